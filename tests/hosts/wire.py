"""Forwards packets between the devices of several hosts, with delay, reordering and loss."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from random import Random

from tests.hosts.link import Link
from tests.hosts.tun import MTU

_ADDRESS = slice(16, 20)  # the destination in an IPv4 packet


class Wire:
    """A thread that reads all devices and writes each packet to its destination.

    Args:
        devices: Files of the devices by address; they are closed at the end.
        seed: Seed of losses and delays.

    Attributes:
        link: Current properties of the connections.
        cut: Addresses, as in packets, that are cut off.
        carried: Number of packets delivered.
        lost: Number of packets lost.
    """

    def __init__(self, devices: Mapping[str, int], seed: int) -> None:
        self.link = Link()
        self.cut: frozenset[bytes] = frozenset()
        self.carried = 0
        self.lost = 0
        self._devices = {socket.inet_aton(address): device for address, device in devices.items()}
        self._addresses = {device: address for address, device in self._devices.items()}
        self._dice = Random(seed)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.close(self._waker)
        if self._thread.ident is not None:
            self._thread.join()
        for file in (self._wake, *self._addresses):
            os.close(file)

    def _run(self) -> None:
        poll = select.epoll()
        with poll:
            for file in (self._wake, *self._addresses):
                poll.register(file, select.EPOLLIN)
            while True:
                timeout_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1
                for file, _ in poll.poll(timeout_s):
                    if file == self._wake:
                        return
                    self._take(file)
                self._deliver()

    def _take(self, device: int) -> None:
        """Read all available packets."""
        while True:
            try:
                packet = os.read(device, MTU)
            except BlockingIOError:
                return
            target = self._devices.get(packet[_ADDRESS])
            if target is None:
                continue  # not IPv4, or no such destination
            ends = {self._addresses[device], self._addresses[target]}
            link = self.link
            if ends & self.cut or self._dice.random() < link.loss:
                self.lost += 1
                continue
            due = time.monotonic() + link.delay_s + self._dice.random() * link.jitter_s
            heapq.heappush(self._late, (due, next(self._numbers), target, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._late)
            try:
                os.write(target, packet)
                self.carried += 1
            except OSError:
                self.lost += 1  # its queue is full, or its host has ended
