"""A network device whose packets are read from a file, in its own network namespace.

It needs neither `ip` nor `tc`, only user namespaces and /dev/net/tun, which not every machine permits. Not every
kernel has the queue that delays and loses packets (sch_netem), so the reader of the file does this.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

MTU = 9000

_ROOT = Path(__file__).parents[2]
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
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
    """Whether this machine permits a namespace with such a device."""
    code = "from tests.hosts import tun; tun.enter_namespace(); tun.make('10.9.0.1')"
    probe = (sys.executable, "-c", code)
    return not subprocess.run(probe, cwd=_ROOT, capture_output=True, timeout=250, check=False).returncode


def enter_namespace() -> None:
    """Move this process, which has one thread, into new user and network namespaces.

    The process is root there. The network has only a loopback device, which is down.
    """
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot create user and network namespaces")
    for file, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
        Path("/proc/self", file).write_text(text)


def make(address: str) -> int:
    """Return the file of a new device that is up and has this address in a /24 network."""
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
