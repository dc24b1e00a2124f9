"""One connection of a peer: its commands in order, records straight from and into the pool's memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lmcache_async.daemon.commands import MAX_COMMAND_BYTES, MalformedError, Put, parse_command
from lmcache_async.daemon.records import is_record
from lmcache_async.daemon.replies import error_reply
from lmcache_async.daemon.verbs import QUIT, Verbs
from lmcache_async.daemon.wire import ConnectionEndedError

if TYPE_CHECKING:
    from lmcache_async.daemon.peer_options import PeerOptions
    from lmcache_async.daemon.wire import Wire

BUFFER_BYTES = 4 * MAX_COMMAND_BYTES
"""Commands that have come and were not looked at yet."""
MAX_REPLY_BYTES = 64 << 10
"""Replies that wait to be sent; once there are more no command is looked at until they are gone."""

MALFORMED = "it said no command"


class PeerSession:
    """Serves one connection; at most one record is on its way at a time, and one lease held.

    Args:
        wire: The connection.
        verbs: What it may say, and the pool behind it.
        options: Deadlines.
    """

    def __init__(self, wire: Wire, verbs: Verbs, options: PeerOptions) -> None:
        self._wire = wire
        self._verbs = verbs
        self._options = options
        self._counts = verbs.counts
        self._data = bytearray(BUFFER_BYTES)
        self._start = self._stop = 0  # what has come and was not taken yet
        self._out = bytearray()
        self._greet_until = asyncio.get_running_loop().time() + options.greeting_timeout_s

    async def serve(self) -> str:
        """Until the other end has gone, or has made us end it; why, "" where nobody need know.

        Up to a colon that is one of a few causes; what follows may be of the other end's choice.

        Cancelled, or ended in any way, it holds no lease, and the connection is aborted.
        """
        why = ""
        try:
            while await self._answer():
                await self._receive()
        except ConnectionEndedError:
            pass
        except TimeoutError:
            why = "it was too slow"
        except MalformedError as error:
            why = f"{MALFORMED}: {error}"
            await self._say_last(error_reply(f"ERR Protocol error: {error}"))
        finally:
            self._wire.abort()
        return why

    async def _answer(self) -> bool:
        """Answer what is there as a whole; False when that was QUIT."""
        while (found := parse_command(self._data, self._start, self._stop)) is not None:
            command, self._start = found
            if isinstance(command, Put):
                self._out += self._verbs.take_asked()
                await self._put(command)
            elif command.verb == "GET" and len(command.arguments) == 1:
                self._out += self._verbs.take_asked()
                await self._get(command.arguments[0])
            elif command.verb == QUIT:
                await self._say_last(self._verbs.take_asked() + b"+OK\r\n")
                return False
            else:
                self._out += self._verbs.answer(command)
            if len(self._out) > MAX_REPLY_BYTES:
                await self._flush()
        self._out += self._verbs.take_asked()
        await self._flush()
        return True

    async def _receive(self) -> None:
        """At least one byte more of commands."""
        left = self._stop - self._start
        self._data[:left] = self._data[self._start : self._stop]
        self._start, self._stop = 0, left
        options = self._options
        async with self._within(options.transfer_timeout_s if left else options.idle_timeout_s):
            self._stop += await self._wire.receive(memoryview(self._data)[left:], 1)

    def _within(self, seconds: float) -> asyncio.Timeout:
        """A deadline; until a token was said it is none after the greeting's, whatever else is said."""
        until = asyncio.get_running_loop().time() + seconds
        return asyncio.timeout_at(until if self._verbs.admitted else min(until, self._greet_until))

    async def _get(self, name: bytes) -> None:
        found = self._verbs.lease(name)
        if isinstance(found, bytes):
            self._out += found
            return
        before = bytes(self._out) + b"$%d\r\n" % found.nbytes
        self._out.clear()
        try:
            async with self._within(self._options.transfer_timeout_s):
                await self._wire.send(found.view, before=before, after=b"\r\n")
        except BaseException:
            self._wire.abort()  # before the lease ends: nothing more of it is to be sent
            raise
        finally:
            self._verbs.pool.release(found)
        self._counts.sent_records += 1
        self._counts.sent_bytes += found.nbytes

    async def _put(self, put: Put) -> None:
        slot = self._verbs.reserve(put)
        if isinstance(slot, bytes):
            self._out += slot
            await self._flush()
            await self._skip(put.nbytes + 2)
            return
        committed = False
        try:
            await self._fill(slot.view)
            await self._take_end()
            if not is_record(slot):
                self._out += error_reply("ERR the value is no record of that length")
                return
            self._verbs.commit(put, slot)
            committed = True
        except BaseException:
            self._wire.abort()  # before the lease ends: nothing more is to come into it
            raise
        finally:
            if not committed:
                self._verbs.pool.release(slot)
        self._out += b"+OK\r\n"
        self._counts.received_records += 1
        self._counts.received_bytes += slot.nbytes

    async def _fill(self, memory: memoryview) -> None:
        taken = min(len(memory), self._stop - self._start)
        memory[:taken] = self._data[self._start : self._start + taken]
        self._start += taken
        if taken < len(memory):
            async with self._within(self._options.transfer_timeout_s):
                await self._wire.receive(memory[taken:], len(memory) - taken)

    async def _take_end(self) -> None:
        end = bytearray(2)
        await self._fill(memoryview(end))
        if end != b"\r\n":
            raise MalformedError("a value does not end where it should")

    async def _skip(self, nbytes: int) -> None:
        """What nobody keeps is read all the same: who sends it may look for an answer only afterwards."""
        if nbytes > self._verbs.max_record_bytes + 2:
            raise MalformedError(f"a value of {nbytes - 2} bytes")
        taken = min(nbytes, self._stop - self._start)
        self._start += taken
        nbytes -= taken
        memory = memoryview(bytearray(min(nbytes, BUFFER_BYTES)))
        async with self._within(self._options.transfer_timeout_s):
            while nbytes:
                piece = memory[:nbytes]
                nbytes -= await self._wire.receive(piece, len(piece))

    async def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, bytearray()
            async with self._within(self._options.transfer_timeout_s):
                await self._wire.send(memoryview(out))

    async def _say_last(self, words: bytes) -> None:
        """Best effort: the connection ends anyhow."""
        self._out += words
        try:
            await self._flush()
            self._wire.close()
            await self._wire.wait_closed()
        except (ConnectionEndedError, TimeoutError):
            return
