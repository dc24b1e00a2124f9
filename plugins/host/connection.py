"""A connection to the daemon. Requests are answered in the order in which they were sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lmcache_async.daemon.messages import (
    MAX_ITEMS,
    Figures,
    Frames,
    Op,
    ProtocolError,
    frame,
    pack_numbers,
    unpack_figures,
    unpack_grants,
)
from lmcache_async.errors import TierError, TierUnavailableError

if TYPE_CHECKING:
    from lmcache_async.daemon.messages import Grant
    from lmcache_async.plugins.host.mapping import Mapping

MAX_UNANSWERED = 256
"""Maximum number of unanswered requests. Further requests fail, except commits."""
MAX_UNANSWERED_BYTES = 16 << 20
CLOSE_S = 1.0
"""Longest wait for `connection_lost` after an abort, in seconds."""


@dataclass(eq=False, slots=True)
class _Question:
    op: Op
    nbytes: int
    answer: asyncio.Future[bytes]
    unwanted: Callable[[bytes], None] | None


class Connection(asyncio.Protocol):
    """A client connection to one daemon. It is not reopened after its end.

    Args:
        where: Name of the daemon in messages.
        daemon: Identifier of the daemon.
        mapping: Mapping of the daemon's memory.
        ended: Called once, after the connection has ended.

    Attributes:
        figures: Figures of the tenant in the last answer.
        questions: Number of requests sent.
    """

    def __init__(
        self, where: str, daemon: bytes, mapping: Mapping, ended: Callable[[Connection], None]
    ) -> None:
        self.where = where
        self.daemon = daemon
        self.mapping = mapping
        self.figures = Figures()
        self.questions = 0
        self._gone = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._frames = Frames()
        self._questions: deque[_Question] = deque()
        self._unanswered_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._error: TierError | None = None

    @property
    def usable(self) -> bool:
        return self._error is None

    def check(self) -> None:
        """Raise the error of the connection if it has ended."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def ask(
        self,
        op: Op,
        *parts: bytes,
        timeout_s: float,
        unwanted: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Send a request and return its answer.

        If the call is cancelled or times out, the answer is still received, and passed to `unwanted`.

        Args:
            op: Operation of the request.
            parts: Body of the request.
            timeout_s: Longest wait for the answer, in seconds.
            unwanted: Called with an answer that arrives after a cancellation or timeout.

        Raises:
            TierUnavailableError: The connection has ended or ends, or there is no answer in time.
        """
        question = self._send(op, parts, unwanted)
        try:
            async with asyncio.timeout(timeout_s):
                return await question.answer
        except TimeoutError as error:
            _forget(question)
            raise TierUnavailableError(
                f"{self.where}: no answer to {op.name} within {timeout_s} s"
            ) from error
        except asyncio.CancelledError:
            _forget(question)
            raise

    def unpack(self, answer: bytes, count: int) -> list[Grant]:
        """Decode `count` grants.

        Raises:
            TierUnavailableError: The answer does not match the request. The connection is closed.
        """
        try:
            return unpack_grants(answer, count, self.mapping.nbytes)
        except ProtocolError as error:
            raise self.fail(error) from error

    def give_back(self, leases: list[int]) -> None:
        """Release leases and reservations. The end of the connection releases them too."""
        if self._transport is None or not self.usable:
            return
        for start in range(0, len(leases), MAX_ITEMS):
            self._transport.write(frame(Op.RELEASE, pack_numbers(leases[start : start + MAX_ITEMS])))

    def fail(self, error: Exception) -> TierError:
        """Close the connection after a protocol error, and return the error to raise."""
        failure = TierUnavailableError(f"{self.where}: {error}")
        self.close(failure)
        return failure

    def close(self, error: TierError) -> None:
        """Close the connection. Pending and later calls fail with `error`."""
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed, at most `CLOSE_S`. Call `close` first."""
        await asyncio.wait([self._gone], timeout=CLOSE_S)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.mapping.begin(self.give_back)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while (message := self._frames.take()) is not None:
                self._answered(*message)
        except ProtocolError as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._error is None:
            reason = f": {error}" if error else ""
            self._error = TierUnavailableError(f"{self.where}: the connection was lost{reason}")
        questions, self._questions = self._questions, deque()
        for question in questions:
            if not question.answer.done():
                question.answer.set_exception(self._error.with_traceback(None))
        self.mapping.end()
        self._gone.set_result(None)
        self._ended(self)

    def _send(self, op: Op, parts: tuple[bytes, ...], unwanted: Callable[[bytes], None] | None) -> _Question:
        self.check()
        assert self._transport is not None
        nbytes = sum(map(len, parts))
        behind = len(self._questions) >= MAX_UNANSWERED
        behind |= self._unanswered_bytes + nbytes > MAX_UNANSWERED_BYTES
        if behind and op is not Op.COMMIT:  # commits end reservations, whose number is limited
            raise TierUnavailableError(f"{self.where}: {len(self._questions)} questions have no answer yet")
        question = _Question(op, nbytes, asyncio.get_running_loop().create_future(), unwanted)
        self._questions.append(question)
        self._unanswered_bytes += nbytes
        self.questions += 1
        self._transport.write(frame(op, *parts))
        return question

    def _answered(self, op: Op, body: bytes) -> None:
        if not self._questions or self._questions[0].op is not op:
            raise ProtocolError(f"an answer to {op.name}, which was not asked")
        self.figures, answer = unpack_figures(body)
        question = self._questions.popleft()
        self._unanswered_bytes -= question.nbytes
        if not question.answer.done():
            question.answer.set_result(answer)
        elif question.unwanted is not None:
            question.unwanted(answer)


def _forget(question: _Question) -> None:
    """Drop the waiter of a request. An answer that came in the same loop iteration goes to `unwanted`."""
    answer = question.answer
    if answer.cancelled() or not answer.done():
        answer.cancel()
    elif answer.exception() is None and question.unwanted is not None:
        question.unwanted(answer.result())
