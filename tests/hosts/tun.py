"""A network device whose packets come out of a file, made in a network namespace of our own.

Needs no `ip` and no `tc`: only user namespaces and /dev/net/tun, which not every machine gives to all users. Not
every kernel has the queue that delays and loses packets (sch_netem), so whoever reads that file does it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
"""Before a command: it is root of a network that has nothing but a loopback, which is down."""
MTU = 9000

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = (
    0x8913,
    0x8914,
    0x8916,
    0x891C,
    0x8922,
)
_IFF_UP = 0x1


def possible() -> bool:
    """Whether a namespace with such a device can be made here."""
    probe = (*IN_A_NAMESPACE, sys.executable, "-c", "from tests.hosts import tun; tun.make('10.9.0.1')")
    try:
        return not subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode
    except OSError:
        return False


def make(address: str) -> int:
    """The device's file, of a device that is up and has that address in a network of 255."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _up(control, b"lo")
        fcntl.ioctl(control, _SIOCSIFADDR, _address(b"wire", address))
        fcntl.ioctl(control, _SIOCSIFNETMASK, _address(b"wire", "255.255.255.0"))
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", b"wire", MTU))
        _up(control, b"wire")
    return device


def _up(control: socket.socket, name: bytes) -> None:
    request = struct.pack("16sh22x", name, 0)
    flags = struct.unpack("16sh22x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))


def _address(name: bytes, address: str) -> bytes:
    return struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(address))
