"""Routing of commands: to a single server, the master that Sentinel reports, or the masters of a cluster."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from lmcache_async.config.values import Endpoint
from lmcache_async.errors import TierClosedError, TierError, TierPartUnavailableError, TierUnavailableError
from lmcache_async.plugins.valkey.connection import (
    Connection,
    ConnectionSettings,
    Node,
    RefusedLoginError,
    refusal,
)
from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode, encode_each
from lmcache_async.tiers.client import deadline
from lmcache_async.types import KEY_BYTES, ChunkKey

T = TypeVar("T")

MAX_REDIRECTS = 4
"""Maximum number of redirects (MOVED, ASK) of a command."""
ASKING = encode(b"ASKING")
SCAN_COUNT = 1000
"""COUNT of a SCAN command: keys that the server examines in one step, which blocks it."""
_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))


class Topology:
    """Sends commands to the nodes of their keys: to a single server, unless a derived class looks the nodes up."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._endpoints = settings.config.address.endpoints
        self._nodes: dict[Endpoint, Node] = {}
        self._closed = False

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        """Return the node of each name, or the error if it has none. Raise TierError if no node is known."""
        return [await self._find()] * len(names)

    async def masters(self) -> list[Node]:
        """Return all nodes that hold keys. Raise TierError if no node is known."""
        return [await self._find()]

    async def ask_each(self, command: bytes, names: Sequence[bytes]) -> list[Reply | TierError]:
        """Send the command for each name, in one message per node, to all nodes concurrently.

        The result of each name of a failed node is the error of the node. Raise TierError if no node is known.
        """
        answers: list[Reply | TierError] = [None] * len(names)
        routes: dict[tuple[Node, bool], list[int]] = {}  # positions by node and whether ASKING is required

        async def ask(node: Node, asking: bool, positions: Sequence[int]) -> None:
            asked = [names[position] for position in positions]
            replies: Sequence[Reply | TierError]
            try:
                if asking:
                    message = b"".join(ASKING + encode(command, name) for name in asked)
                    replies = (await node.call(message, 2 * len(asked)))[1::2]
                else:
                    replies = await node.call(encode_each(command, asked), len(asked))
            except TierError as error:
                replies = [self.classify(node, error)] * len(asked)
            for position, reply in zip(positions, replies, strict=True):
                answers[position] = reply

        def redirect(node: Node, position: int) -> None:
            reply = answers[position]
            if isinstance(reply, ErrorReply):
                further = self.follow(names[position], reply)
                if further is None:
                    answers[position] = refusal(node.where, reply)
                else:
                    routes.setdefault(further, []).append(position)

        for position, node in enumerate(await self.route(names)):
            if isinstance(node, TierError):
                answers[position] = node
            else:
                routes.setdefault((node, False), []).append(position)
        for _ in range(MAX_REDIRECTS):
            current, routes = routes, {}
            if len(current) == 1:
                [((node, asking), positions)] = current.items()
                await ask(node, asking, positions)
            else:
                async with asyncio.TaskGroup() as group:
                    for (node, asking), positions in current.items():
                        group.create_task(ask(node, asking, positions))
            for (node, _), positions in current.items():
                for position in positions:
                    redirect(node, position)
            if not routes:
                return answers
        for position in (position for positions in routes.values() for position in positions):
            answers[position] = _redirected_too_often()
        return answers

    async def run_at_node(self, name: bytes, run: Callable[[Connection], Awaitable[T | ErrorReply]]) -> T:
        """Run a command for the name on a connection to its node, and follow redirects."""
        [node] = await self.route([name])
        if isinstance(node, TierError):
            raise node
        asking = False
        for _ in range(MAX_REDIRECTS):
            try:
                async with node.connection() as connection:
                    if asking:
                        connection.call(ASKING, 1)  # its reply precedes that of the command
                    answer = await run(connection)
            except TierUnavailableError as error:
                raise self.classify(node, error) from error
            if not isinstance(answer, ErrorReply):
                return answer
            further = self.follow(name, answer)
            if further is None:
                raise refusal(node.where, answer)
            node, asking = further
        raise _redirected_too_often()

    async def scan(self, prefix: bytes) -> AsyncGenerator[list[ChunkKey], None]:
        """Yield the keys under the prefix in batches. A key may be yielded twice.

        If a node fails, TierError is raised after the other nodes were listed.
        """
        failed: TierError | None = None
        for node in await self.masters():
            cursor: bytes | None = None
            while cursor != b"0":
                try:
                    cursor, found = await _scan_step(node, cursor or b"0", prefix)
                except TierError as error:
                    failed = error
                    break
                yield found
        if failed is not None:
            raise failed

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        """Return the node that an error reply redirects to and whether ASKING is required; else None."""
        del name, reply
        return None

    def classify(self, node: Node, error: TierError) -> TierError:
        """Return the tier's error for an error of a node: TierPartUnavailableError if only some nodes are unavailable."""
        others_serve = any(other is not node and not other.failed for other in self._nodes.values())
        if others_serve and isinstance(error, TierUnavailableError):
            return TierPartUnavailableError(str(error))
        return error

    def note_failure(self) -> None:
        """Note that a node could not be reached or did not answer."""

    def close(self) -> None:
        """Close all connections; calls under way fail with TierClosedError."""
        self._closed = True
        for node in self._all():
            node.close(TierClosedError(f"{node.where}: the tier was closed"))

    async def wait_closed(self) -> None:
        for node in self._all():
            await node.wait_closed()

    def node(self, endpoint: Endpoint) -> Node:
        """Return the node of an endpoint, created on first use."""
        if self._closed:
            raise TierClosedError("the valkey tier was closed")
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = Node(endpoint, self._settings, self.note_failure)
        return node

    def keep(self, endpoints: set[Endpoint]) -> None:
        """Close the nodes of all other endpoints."""
        for endpoint in self._nodes.keys() - endpoints:
            node = self._nodes.pop(endpoint)
            node.close(TierUnavailableError(f"{node.where}: it is not a master any more"))

    async def _find(self) -> Node:
        return self.node(self._endpoints[0])

    def _all(self) -> list[Node]:
        return list(self._nodes.values())

    def _find_deadline(self, where: str, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Limit the search for a server to the time of two requests: one to a server that hangs, one to the next."""
        seconds = 2 * self._settings.config.lookup_timeout_s
        return deadline(seconds, where, what, "twice lookup_timeout_s")


def _redirected_too_often() -> TierError:
    return TierUnavailableError(f"the cluster redirected the command {MAX_REDIRECTS} times")


def _none_answers(what: str, failures: Sequence[TierError]) -> TierError:
    """Return the error if every server has failed. A refused login is an error of the configuration."""
    is_refused = any(isinstance(error, RefusedLoginError) for error in failures)
    kind = RefusedLoginError if is_refused else TierUnavailableError
    return kind(f"{what}: {'; '.join(map(str, failures))}")


async def _scan_step(node: Node, cursor: bytes, prefix: bytes) -> tuple[bytes, list[ChunkKey]]:
    pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", prefix) + b"*"
    command = encode(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)
    match await node.call(command, 1):
        case [ErrorReply() as reply]:
            raise refusal(node.where, reply)
        case [[bytes(after), list(names)]]:
            return after, [key for name in names if (key := _key_of(name, prefix)) is not None]
    raise TierUnavailableError(f"{node.where} sent an invalid reply to SCAN")


def _key_of(name: Reply, prefix: bytes) -> ChunkKey | None:
    """Return the chunk key of a stored name; None for names of other data."""
    if not (isinstance(name, bytes) and name.startswith(prefix) and _HEX.fullmatch(name, len(prefix))):
        return None
    return ChunkKey(bytes.fromhex(name[len(prefix) :].decode("ascii")))


class SentinelServer(Topology):
    """The master that one of the Sentinels reports; requested again after a failure of the master.

    The Sentinels are queried one after the other. One that does not answer is moved to the end.
    """

    def __init__(self, settings: ConnectionSettings, sentinel_settings: ConnectionSettings) -> None:
        super().__init__(settings)
        self._sentinels = [Node(endpoint, sentinel_settings, lambda: None) for endpoint in self._endpoints]
        self._service = settings.config.sentinel_service
        self._master: Node | None = None
        self._lock = asyncio.Lock()

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        """Request the master again if the server has become a replica."""
        if reply.code in {"READONLY", "MASTERDOWN", "FAILOVER"}:
            self.note_failure()
        return None

    def note_failure(self) -> None:
        self._master = None

    def _all(self) -> list[Node]:
        return [*super()._all(), *self._sentinels]

    async def _find(self) -> Node:
        async with (
            self._find_deadline(f"the master {self._service!r}", "sentinel that reports it"),
            self._lock,
        ):
            if self._master is None:
                endpoint = await self._ask_all()
                self.keep({endpoint})
                self._master = self.node(endpoint)
            return self._master

    async def _ask_all(self) -> Endpoint:
        failures: list[TierError] = []
        for sentinel in tuple(self._sentinels):
            try:
                return await self._ask(sentinel)
            except RefusedLoginError as error:
                message = str(error).replace("username", "sentinel_username")
                failures.append(RefusedLoginError(message.replace("password_", "sentinel_password_")))
            except TierClosedError:
                raise
            except TierError as error:
                failures.append(error)
            self._sentinels.remove(sentinel)
            self._sentinels.append(sentinel)
        raise _none_answers(f"no sentinel reports the master {self._service!r}", failures)

    async def _ask(self, sentinel: Node) -> Endpoint:
        command = encode(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        [reply] = await sentinel.call(command, 1)
        match reply:
            case ErrorReply():
                raise refusal(sentinel.where, reply)
            case [bytes(host), bytes(port)] if port.isdigit():
                return Endpoint(host.decode("utf-8", "replace"), int(port))
            case [_, _]:
                raise TierUnavailableError(f"{sentinel.where} reports an invalid address of the master")
            case _:
                raise TierUnavailableError(
                    f"{sentinel.where} has no master {self._service!r}: check sentinel_service"
                )


SLOTS = 16384
REFRESH_S = 0.5
"""Shortest time between requests for the table. Each MOVED corrects its own slot at once."""


def slot_of(name: bytes) -> int:
    """Return the slot of a name without braces."""
    return binascii.crc_hqx(name, 0) % SLOTS


def parse_slots(reply: Reply, asked: Endpoint) -> list[Endpoint | None]:
    """Return the master of each slot from the reply to CLUSTER SLOTS; None for slots without one.

    The host of `asked`, which sent the reply, is used for addresses without one. Raise ValueError if the reply
    has another form.
    """
    table: list[Endpoint | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else [reply]:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                text = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
                master = Endpoint(asked.host if text in {"", "?"} else text, port)
                table[first : last + 1] = [master] * (last + 1 - first)
            case _:
                raise ValueError("expected first slot, last slot and master in each entry")
    return table


def parse_redirect(text: str, asked: Endpoint | None = None) -> tuple[int, Endpoint] | None:
    """Parse slot and endpoint of `MOVED 42 host:port` or `ASK ...`; None for other texts."""
    words = text.split()
    if len(words) != 3 or not words[1].isdigit() or int(words[1]) >= SLOTS:
        return None
    host, _, port = words[2].rpartition(":")
    host = host.strip("[]") or (asked.host if asked else "")
    return (int(words[1]), Endpoint(host, int(port))) if host and port.isdigit() else None


class Cluster(Topology):
    """A cluster: 16384 slots, each with a master.

    The table of slots is requested on first use. After a node redirected a command or could not be reached, or a
    slot had no node, the next call requests it again, at most every `REFRESH_S` seconds.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__(settings)
        self._table: list[Endpoint | None] | None = None
        self._stale = True
        self._refreshed = float("-inf")
        self._refreshing = asyncio.Lock()

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        table = await self._current()
        endpoints = [table[slot_of(name)] for name in names]
        self._stale = self._stale or None in endpoints  # a node may get the slot at any time
        text = "no node of the cluster serves the slot of the key: see CLUSTER SHARDS"
        return [TierUnavailableError(text) if each is None else self.node(each) for each in endpoints]

    async def masters(self) -> list[Node]:
        table = await self._current()
        return [self.node(endpoint) for endpoint in dict.fromkeys(table) if endpoint is not None]

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        if reply.code not in {"MOVED", "ASK"}:
            self._stale = self._stale or reply.code in {"CLUSTERDOWN", "READONLY"}
            return None
        asked = self._table[slot_of(name)] if self._table else None
        redirect = parse_redirect(reply.text, asked)
        if redirect is None:
            return None
        slot, endpoint = redirect
        if reply.code == "MOVED":
            self._stale = True
            if self._table:
                self._table[slot] = endpoint
        return self.node(endpoint), reply.code == "ASK"

    def note_failure(self) -> None:
        self._stale = True

    async def _current(self) -> list[Endpoint | None]:
        """Return the table of slots, requested again if it may have changed."""
        now = asyncio.get_running_loop().time()
        is_due = self._stale and now >= self._refreshed + REFRESH_S and not self._refreshing.locked()
        if self._table is not None and not is_due:
            return self._table
        try:
            async with self._find_deadline("the cluster", "table of slots"), self._refreshing:
                if self._table is None or is_due:
                    return await self._refresh()
        except TierError:
            if self._table is None:
                raise
        return self._table

    async def _refresh(self) -> list[Endpoint | None]:
        """Request the table. While slots are missing, request it from further nodes: a removed node sends an empty table."""
        self._refreshed = asyncio.get_running_loop().time()
        failures: list[TierError] = []
        tables: list[list[Endpoint | None]] = []
        nodes = [self.node(endpoint) for endpoint in dict.fromkeys([*self._nodes, *self._endpoints])]
        for node in sorted(nodes, key=lambda node: node.suspended):
            try:
                [reply] = await node.call(encode(b"CLUSTER", b"SLOTS"), 1)
                if isinstance(reply, ErrorReply):
                    raise refusal(node.where, reply)
                tables.append(parse_slots(reply, node.endpoint))
            except ValueError as error:
                failures.append(TierError(f"{node.where}: {error}"))
            except TierError as error:
                failures.append(error)
            else:
                if None not in tables[-1]:
                    break
        if not tables:
            raise _none_answers("no node of the cluster returns its table of slots", failures)
        self._table, self._stale = min(tables, key=lambda table: table.count(None)), False
        self.keep({endpoint for endpoint in dict.fromkeys(self._table) if endpoint is not None})
        return self._table


def make_topology(settings: ConnectionSettings, sentinel_settings: ConnectionSettings) -> Topology:
    """Create the topology of a config, without connecting."""
    match settings.config.effective_mode:
        case "sentinel":
            return SentinelServer(settings, sentinel_settings)
        case "cluster":
            return Cluster(settings)
        case "single":
            return Topology(settings)
