"""Free ports for servers of tests."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support import processes


def test_no_connection_gets_a_free_port() -> None:
    low, high = map(int, processes.EPHEMERAL.read_text().split())
    ports = processes.free_ports(64)
    assert len(set(ports)) == 64
    assert not [port for port in ports if low <= port <= high]


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = tmp_path / "range"
    few.write_text("10000\t65499\n")
    monkeypatch.setattr(processes, "EPHEMERAL", few)
    port = processes.free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert port not in processes.free_ports(100)
    assert port in processes.free_ports(100)
