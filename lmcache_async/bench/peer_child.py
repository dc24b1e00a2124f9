"""A peer in a process of its own.

Peers leave threads behind, replace signal handlers and may crash; none of that is to reach us. Seconds are taken in
that process, around the peer's own call, so the way between the processes is not in them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lmcache_async.bench.peer_work import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from lmcache_async.bench.peer_work import PeerModule, Workload

_START_S = 180.0
_TASK_S = 120.0
_END_S = 5.0

QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "CRITICAL",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set in a peer's process: it tells nobody of its use, and prints next to nothing."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A peer that there may be.

    Attributes:
        package: By which it is found.
        module: Our file that drives it.
    """

    title: str
    package: str
    module: str

    @property
    def name(self) -> str:
        """With the version that is installed."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            names = importlib.metadata.packages_distributions().get(self.package, [self.package])
            return f"{self.title} {importlib.metadata.version(names[0])}"
        return self.title

    @contextlib.contextmanager
    def open(self, work: Workload) -> Iterator[ChildPeer]:
        """Its process.

        Raises:
            PeerError: It is not installed, or does not start.
        """
        if importlib.util.find_spec(self.package) is None:
            raise PeerError(f"the package {self.package} is not installed")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(self.module, work, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            peer = ChildPeer(self.name, ours)
            peer.wait_ready()
            yield peer
        finally:
            ours.close()
            process.terminate()
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()


class ChildPeer:
    """See `Peer`."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.tasks: frozenset[str] = frozenset()
        self._connection = connection

    def wait_ready(self) -> None:
        """Raises PeerError where it does not start."""
        self.tasks = frozenset(self._answer(_START_S)["tasks"])

    async def seconds(self, task: str) -> float:
        # The loop is blocked meanwhile: while one is measured, the other is to do nothing.
        try:
            self._connection.send_bytes(task.encode())
        except OSError as error:
            raise PeerError(f"its process has ended: {error}") from error
        return float(self._answer(_TASK_S)["seconds"])

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(deadline_s):
                raise PeerError(f"no answer within {deadline_s:.0f} s")
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerError("its process has ended") from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


def serve(module: str, work: Workload, connection: Any) -> None:
    """The peer's process: does what it is told until nobody tells it anything more."""
    os.environ.update(QUIET)

    def tell(**answer: str | float | list[str]) -> None:
        connection.send_bytes(json.dumps(answer).encode())

    try:
        tasks = cast("PeerModule", importlib.import_module(module)).tasks(work)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        tell(error=_told(error))
        return
    tell(tasks=list(tasks))
    ready, run = "", _unknown
    with contextlib.suppress(EOFError, OSError), contextlib.ExitStack() as used:
        while True:
            task = connection.recv_bytes().decode()
            try:
                if task != ready:
                    ready, run = "", _unknown
                    used.close()  # what the last one used goes first
                    run = used.enter_context(tasks[task]())
                    ready = task
                tell(seconds=run())
            except Exception as error:  # noqa: BLE001 - told to who asked
                ready = ""
                tell(error=_told(error))


def _unknown() -> float:
    raise PeerError("nothing is ready")


def _told(error: BaseException) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, PeerError) else f"{type(error).__name__}: {text[:300]}"
