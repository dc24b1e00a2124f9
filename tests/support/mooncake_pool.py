"""A real Mooncake master, and a process that provides the memory of the pool."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.plugins.mooncake import MooncakeConfig
from tests.support import native
from tests.support.processes import accepts, free_ports, started, wait_until
from tools.benchmarks import mooncake_store

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_STORE = Path(mooncake_store.__file__)


class MooncakePool:
    """A master on its own port, with memory in another process, so that records outlive their client.

    Args:
        directory: Directory for the log of both processes.
        nbytes: Bytes of memory.
        flags: Additional flags of the master.
    """

    def __init__(self, directory: Path, nbytes: int = 512 << 20, *flags: str) -> None:
        native.load_libraries()
        package = importlib.util.find_spec("mooncake")
        assert package is not None
        assert package.origin is not None
        self._program = Path(package.origin).with_name("mooncake_master")
        self.port, self._metrics_port = free_ports(2)
        self._nbytes = nbytes
        self._flags = flags
        self._log = (directory / "mooncake.log").open("w")
        self._master: subprocess.Popen[bytes] | None = None
        self._segment: subprocess.Popen[bytes] | None = None

    @property
    def tier(self) -> dict[str, object]:
        """Settings of the tier, for a process with the variables of `tests.support.native.environment`."""
        return {"name": "mooncake", "url": f"mooncake://127.0.0.1:{self.port}", "hostname": "127.0.0.1"}

    @contextlib.contextmanager
    def client(self) -> Iterator[MooncakeDistributedStore]:
        """Mooncake's own client. Closing it takes half a second."""
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        master = f"127.0.0.1:{self.port}"
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
        yield store
        store.close()

    def start(self) -> None:
        self.start_master()
        self.start_segment()

    def start_master(self) -> None:
        self._master = subprocess.Popen(
            [
                str(self._program),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                f"--metrics_port={self._metrics_port}",
                "--enable_metric_reporting=false",
                "--default_kv_lease_ttl=5000",
                "--logtostderr",
                *self._flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=native.environment(),
        )
        wait_until(lambda: accepts(self.port), self._master)

    def start_segment(self) -> None:
        self._segment = subprocess.Popen(
            [sys.executable, "-P", str(_STORE), f"127.0.0.1:{self.port}", str(self._nbytes)],
            stdin=subprocess.PIPE,  # it exits when this pipe is closed
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=native.environment() | {"GLOG_minloglevel": "2"},
        )
        assert self._segment.stdout is not None
        while line := self._segment.stdout.readline():
            if line == b"ready\n":
                return
        raise AssertionError(f"the pool has no memory; see {self._log.name}")

    def signal_master(self, number: signal.Signals) -> None:
        _signal(self._master, number)

    def signal_segment(self, number: signal.Signals) -> None:
        _signal(self._segment, number)

    def stop(self) -> None:
        for process in (self._segment, self._master):
            if process is not None:
                _signal(process, signal.SIGKILL)
        self._log.close()


def running(
    directory: Path, nbytes: int = 512 << 20, *flags: str
) -> contextlib.AbstractContextManager[MooncakePool]:
    return started(MooncakePool(directory, nbytes, *flags))


def make_config(pool: MooncakePool, **options: object) -> MooncakeConfig:
    """Return a config with its own key prefix and with batches of about three records."""
    whole = pool.tier | {"prefix": f"{uuid.uuid4().hex}/", "batch_bytes": 200_000} | options
    del whole["name"]
    return MooncakeConfig.model_validate(whole)


def replace(store: MooncakeDistributedStore, name: str, edit: Callable[[bytes], bytes]) -> bool:
    """Change a stored record without the tier."""
    content = edit(store.get(name))
    assert store.remove(name, force=True) == 0
    memory = ctypes.create_string_buffer(content, max(1, len(content)))
    return bool(store.put_from(name, ctypes.addressof(memory), len(content)) == 0)


def kill_store(pool: MooncakePool) -> None:
    pool.signal_segment(signal.SIGKILL)


def kill_master(pool: MooncakePool) -> None:
    pool.signal_master(signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    """Send a signal. Wait for the exit after SIGKILL, and for the stop of all threads after SIGSTOP."""
    assert process is not None
    process.send_signal(number)
    while number == signal.SIGSTOP and not _stopped(process.pid):
        time.sleep(0)
    if number != signal.SIGKILL:
        return
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
