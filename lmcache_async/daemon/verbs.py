"""What a peer may say, and what is answered: short commands, and the pool behind the long ones. No I/O."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lmcache_async.daemon.peer_options import DEFAULT_USER
from lmcache_async.daemon.replies import bulk, error_reply, no_auth, not_writable
from lmcache_async.daemon.scans import SCAN_COUNT, Scans
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from lmcache_async.daemon.commands import Command, Put
    from lmcache_async.daemon.peer_options import Tokens
    from lmcache_async.daemon.pool import Pool, Slot

QUIT = "QUIT"
MAX_FAILED_LOGINS = 3
_NAME = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
_VERSION = b"7.2.0"
"""Of the server whose commands ours are some of; clients look at it."""

_Handler: TypeAlias = Callable[[tuple[bytes, ...]], bytes]


@dataclass(slots=True)
class PeerCounts:
    """What was moved and refused since the server was opened.

    Attributes:
        sent_records: Whole ones that were read.
        sent_bytes: Theirs.
        misses: GETs of what is not there.
        received_records: Whole ones that are kept.
        received_bytes: Theirs.
        refused: Connections that were one too many.
        failed_logins: Wrong tokens.
        ended: Connections that we ended, by cause.
    """

    sent_records: int = 0
    sent_bytes: int = 0
    misses: int = 0
    received_records: int = 0
    received_bytes: int = 0
    refused: int = 0
    failed_logins: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class Verbs:
    """The commands of one connection.

    Args:
        pool: The records.
        tokens: Who may see whose.
        scans: Lists of keys that are being given out.
        writable: Whether records may be put and removed.
        max_record_bytes: Longest value that is ever taken.
        counts: Counted into.
    """

    def __init__(
        self,
        pool: Pool,
        tokens: Tokens,
        scans: Scans,
        *,
        writable: bool,
        max_record_bytes: int,
        counts: PeerCounts,
    ) -> None:
        self.pool = pool
        self.counts = counts
        self.max_record_bytes = max_record_bytes
        self._tokens = tokens
        self._scans = scans
        self._writable = writable
        self._tenant: str | None = None if tokens.required else DEFAULT_USER
        self._failed = 0
        self._protocol = 2
        self._asked: list[ChunkKey | None] = []
        self._handlers: dict[str, tuple[_Handler, int, int]] = {
            "PING": (self._ping, 0, 1),
            "ECHO": (lambda words: bulk(words[0]), 1, 1),
            "SELECT": (self._select, 1, 1),
            "CLIENT": (self._client, 1, 3),
            "COMMAND": (lambda words: b"*0\r\n", 0, 99),
            "EXISTS": (self._exists, 1, 999),
            "STRLEN": (self._strlen, 1, 1),
            "UNLINK": (self._unlink, 1, 999),
            "DEL": (self._unlink, 1, 999),
            "SCAN": (self._scan, 1, 7),
            "DBSIZE": (self._dbsize, 0, 0),
            "INFO": (self._info, 0, 9),
        }

    @property
    def admitted(self) -> bool:
        """Whether it is known whose records may be seen."""
        return self._tenant is not None

    def answer(self, command: Command) -> bytes:
        """The reply to a short command; one EXISTS after the other is answered by `take_asked`."""
        verb, words = command.verb, command.arguments
        if verb == "EXISTS" and len(words) == 1 and self._tenant is not None:
            self._asked.append(_key(words[0]))
            return b""
        return self.take_asked() + self._answer(verb, words)

    def take_asked(self) -> bytes:
        """The replies to the EXISTS that came one after the other: in the pool's eyes they are one prompt."""
        if not self._asked or self._tenant is None:
            return b""
        asked, self._asked = self._asked, []
        known = [key for key in asked if key is not None]
        there = iter(self.pool.contains(self._tenant, known))
        return b"".join([b":%d\r\n" % (key is not None and next(there)) for key in asked])

    def lease(self, name: bytes) -> Slot | bytes:
        """A reader's lease, or the reply where there is none."""
        if self._tenant is None:
            return no_auth()
        key = _key(name)
        slot = None if key is None else self.pool.lease(self._tenant, key)
        if slot is None:
            self.counts.misses += 1
            return b"_\r\n" if self._protocol == 3 else b"$-1\r\n"
        return slot

    def reserve(self, put: Put) -> Slot | bytes:
        """A writer's lease, or the reply where there is none."""
        if self._tenant is None:
            return no_auth()
        if not self._writable:
            return not_writable()
        key = _key(put.name)
        if key is None:
            return error_reply(f"ERR a record's name is {2 * KEY_BYTES} digits of 0-9 and a-f")
        if not 0 < put.nbytes <= self.max_record_bytes:
            return error_reply(f"ERR a record has 1 to {self.max_record_bytes} bytes, not {put.nbytes}")
        slot = self.pool.reserve(self._tenant, put.nbytes, key=key)
        return slot or error_reply(f"OOM there is no room for {put.nbytes} bytes")

    def commit(self, put: Put, slot: Slot) -> None:
        key = _key(put.name)
        assert key is not None  # reserved
        assert self._tenant is not None
        self.pool.commit(self._tenant, key, slot)

    def _answer(self, verb: str, words: tuple[bytes, ...]) -> bytes:
        if verb == "AUTH":
            return self._auth(words)
        if verb == "HELLO":
            return self._hello(words)
        if self._tenant is None:
            return no_auth()
        if verb in {"GET", "SET"}:
            return error_reply(f"ERR wrong number of arguments for {verb}, which takes no options here")
        if verb not in self._handlers:
            return error_reply(f"ERR unknown command {verb[:20]!r}")
        handler, least, most = self._handlers[verb]
        if not least <= len(words) <= most:
            return error_reply(f"ERR wrong number of arguments for {verb}")
        return handler(words)

    def _auth(self, words: tuple[bytes, ...]) -> bytes:
        if len(words) not in {1, 2}:
            return error_reply("ERR wrong number of arguments for AUTH")
        if not self._tokens.required:
            return error_reply("ERR AUTH was said, but there are no tokens here; see peer.token_file")
        user = words[0] if len(words) == 2 else DEFAULT_USER.encode()
        tenant = None if self._failed >= MAX_FAILED_LOGINS else self._tokens.tenant_of(user, words[-1])
        if tenant is None:
            self._failed += 1
            self.counts.failed_logins += 1
            return error_reply("WRONGPASS the user does not have that token")
        self._tenant = tenant
        return b"+OK\r\n"

    def _hello(self, words: tuple[bytes, ...]) -> bytes:
        protocol = self._protocol
        if words:
            if words[0] not in {b"2", b"3"}:
                return error_reply("NOPROTO the protocols are 2 and 3")
            protocol = int(words[0])
        left = list(words[1:])
        while left:
            option = left.pop(0).upper()
            if option == b"AUTH" and len(left) >= 2:
                reply = self._auth((left.pop(0), left.pop(0)))
                if reply.startswith(b"-"):
                    return reply
            elif option == b"SETNAME" and left:
                left.pop(0)
            else:
                return error_reply("ERR HELLO takes a protocol, AUTH and SETNAME")
        if self._tenant is None:
            return no_auth()
        self._protocol = protocol
        told = {
            b"server": bulk(b"lmcache-async"),
            b"version": bulk(_VERSION),
            b"proto": b":%d\r\n" % protocol,
            b"mode": bulk(b"standalone"),
            b"role": bulk(b"master"),
            b"modules": b"*0\r\n",
        }
        head = b"%%%d\r\n" % len(told) if protocol == 3 else b"*%d\r\n" % (2 * len(told))
        return head + b"".join([bulk(name) + value for name, value in told.items()])

    def _ping(self, words: tuple[bytes, ...]) -> bytes:
        return bulk(words[0]) if words else b"+PONG\r\n"

    def _select(self, words: tuple[bytes, ...]) -> bytes:
        return b"+OK\r\n" if words[0] == b"0" else error_reply("ERR there is the database 0 alone")

    def _client(self, words: tuple[bytes, ...]) -> bytes:
        if words[0].upper() in {b"SETNAME", b"SETINFO"}:
            return b"+OK\r\n"
        return error_reply("ERR CLIENT takes SETNAME and SETINFO")

    def _exists(self, words: tuple[bytes, ...]) -> bytes:
        known = [key for word in words if (key := _key(word)) is not None]
        return b":%d\r\n" % sum(self.pool.contains(self._name, known))

    def _strlen(self, words: tuple[bytes, ...]) -> bytes:
        key = _key(words[0])
        slot = None if key is None else self.pool.lease(self._name, key)
        if slot is None:
            return b":0\r\n"
        self.pool.release(slot)
        return b":%d\r\n" % slot.nbytes

    def _unlink(self, words: tuple[bytes, ...]) -> bytes:
        if not self._writable:
            return not_writable()
        known = [key for word in words if (key := _key(word)) is not None]
        return b":%d\r\n" % sum([self.pool.remove(self._name, key) for key in known])

    def _scan(self, words: tuple[bytes, ...]) -> bytes:
        pattern, count = b"*", SCAN_COUNT
        for option, value in zip(words[1::2], words[2::2], strict=False):
            if option.upper() == b"MATCH":
                pattern = value
            elif option.upper() == b"COUNT" and value.isdigit() and len(value) < 10:
                count = int(value)
            elif option.upper() != b"TYPE":
                return error_reply("ERR SCAN takes MATCH, COUNT and TYPE")
        if len(words) % 2 == 0 or not words[0].isdigit() or len(words[0]) > 19:
            return error_reply("ERR SCAN takes a cursor, and options with their values")
        step = self._scans.step(self._name, int(words[0]), count, lambda: self.pool.keys(self._name))
        if step is None:
            return error_reply("ERR the cursor is too old; begin again with 0")
        names = [key.hex() for key in step.keys]
        if pattern != b"*":
            names = fnmatch.filter(names, pattern[:100].decode("utf-8", "replace"))
        found = b"".join([bulk(name.encode()) for name in names])
        return b"*2\r\n%b*%d\r\n%b" % (bulk(b"%d" % step.cursor), len(names), found)

    def _dbsize(self, words: tuple[bytes, ...]) -> bytes:
        del words
        return b":%d\r\n" % self._chunks()

    def _info(self, words: tuple[bytes, ...]) -> bytes:
        del words
        counts = self.counts
        told = {
            "server_name": "lmcache-async",
            "redis_version": _VERSION.decode(),
            "tenant": self._name,
            "maxmemory": self.pool.statistics().max_bytes,
            "sent_records": counts.sent_records,
            "sent_bytes": counts.sent_bytes,
            "misses": counts.misses,
            "received_records": counts.received_records,
            "received_bytes": counts.received_bytes,
            "db0": f"keys={self._chunks()}",
        }
        return bulk("".join([f"{name}:{value}\r\n" for name, value in told.items()]).encode())

    def _chunks(self) -> int:
        tenant = self.pool.statistics().tenants.get(self._name)
        return 0 if tenant is None else tenant.chunks

    @property
    def _name(self) -> str:
        assert self._tenant is not None  # looked at before
        return self._tenant


def _key(name: bytes) -> ChunkKey | None:
    """The key of a record's name; what has none is never there."""
    return ChunkKey(bytes.fromhex(name.decode("ascii"))) if _NAME.fullmatch(name) else None
