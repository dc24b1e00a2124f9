"""Routing of keys: to a single server, the master that Sentinel reports, or the masters of a cluster."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from lmcache_async.config.values import Endpoint
from lmcache_async.errors import TierClosedError, TierError, TierPartUnavailableError, TierUnavailableError
from lmcache_async.plugins.valkey.config import Credentials, ValkeyConfig, make_tls_context
from lmcache_async.plugins.valkey.connection import Dialer, RefusedCredentialsError, deadline, refusal
from lmcache_async.plugins.valkey.node import Node
from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode

if TYPE_CHECKING:
    import ssl

    from lmcache_async.plugins.valkey.connection import Connection

FIND_OPTION = "twice lookup_timeout_s"
"""Name of the time limit for finding the servers, for messages. It suffices for one server that hangs and the next."""

MakeNode = Callable[[Endpoint, Callable[[], None]], Node]
"""Creates the node of an endpoint; the callable is its `on_failure`."""


class Topology(ABC):
    """Routing of keys to nodes, updated when the nodes change."""

    def __init__(self, make_node: MakeNode, timeout_s: float = 0.0) -> None:
        self._make_node = make_node
        self._timeout_s = timeout_s  # to find the nodes
        self._nodes: dict[Endpoint, Node] = {}
        self._retired: list[Node] = []  # nodes whose connections may be in use
        self._closed = False

    @abstractmethod
    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        """Return the node of each name, or the error if it has none.

        Raises:
            TierUnavailableError: The nodes are unknown.
        """

    @abstractmethod
    async def masters(self) -> list[Node]:
        """Return all nodes that hold keys.

        Raises:
            TierUnavailableError: The nodes are unknown.
        """

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        """Return the node that an error reply redirects to and whether ASKING is required; else None."""
        del name, reply
        return None

    def classify(self, node: Node, error: TierError) -> TierError:
        """Return the tier's error for an error of a node."""
        del node
        return error

    def close(self) -> None:
        """Close all connections; calls under way fail with TierClosedError."""
        self._closed = True
        for node in [*self._nodes.values(), *self._retired]:
            node.close()

    async def wait_closed(self) -> None:
        for node in [*self._nodes.values(), *self._retired]:
            await node.wait_closed()

    def note_failure(self) -> None:
        """Note that a node could not be reached or did not answer."""

    def node(self, endpoint: Endpoint) -> Node:
        """Return the node of an endpoint, created on first use."""
        if self._closed:
            raise TierClosedError("the valkey tier was closed")
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = self._make_node(endpoint, self.note_failure)
        return node

    def keep(self, endpoints: set[Endpoint]) -> None:
        """Retire all other nodes."""
        self._retired = [node for node in self._retired if not node.unused]
        for endpoint in self._nodes.keys() - endpoints:
            node = self._nodes.pop(endpoint)
            node.retire()
            self._retired.append(node)


class SingleServer(Topology):
    """A single server."""

    def __init__(self, endpoint: Endpoint, make_node: MakeNode) -> None:
        super().__init__(make_node)
        self._endpoint = endpoint

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        return [self.node(self._endpoint)] * len(names)

    async def masters(self) -> list[Node]:
        return [self.node(self._endpoint)]


class SentinelServer(Topology):
    """The master that one of the Sentinels reports; requested again after a failure of the master.

    Args:
        sentinels: Queried one after the other. One that does not answer is moved to the end.
        service: Name of the master at the Sentinels.
        dialer: For the Sentinels.
        make_node: For the master.
        timeout_s: Longest time to find the master, in seconds.
    """

    def __init__(
        self,
        sentinels: Sequence[Endpoint],
        service: str,
        dialer: Dialer,
        make_node: MakeNode,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(make_node, timeout_s)
        self._sentinels = list(sentinels)
        self._service = service
        self._dialer = dialer
        self._master: Node | None = None
        self._contacted: set[Connection] = set()
        self._lock = asyncio.Lock()

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        return [await self._find()] * len(names)

    async def masters(self) -> list[Node]:
        return [await self._find()]

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        """Request the master again if the server has become a replica."""
        if reply.code in {"READONLY", "MASTERDOWN", "FAILOVER"}:
            self.note_failure()
        return None

    def note_failure(self) -> None:
        self._master = None

    def close(self) -> None:
        super().close()
        for connection in self._contacted:
            connection.abort(TierClosedError("the valkey tier was closed"))

    async def wait_closed(self) -> None:
        await super().wait_closed()
        for connection in tuple(self._contacted):
            await connection.wait_closed()

    async def _find(self) -> Node:
        where = f"the master {self._service!r}"
        async with deadline(self._timeout_s, where, "sentinel that reports it", FIND_OPTION), self._lock:
            if self._master is None:
                endpoint = await self._ask_all()
                self.keep({endpoint})
                self._master = self.node(endpoint)
            return self._master

    async def _ask_all(self) -> Endpoint:
        errors: list[TierError] = []
        for sentinel in tuple(self._sentinels):
            try:
                async with deadline(
                    self._dialer.timeout_s, f"sentinel at {sentinel}", "answer", "connect_timeout_s"
                ):
                    endpoint = await self._ask(sentinel)
            except RefusedCredentialsError as error:
                message = str(error).replace("username", "sentinel_username")
                errors.append(TierError(message.replace("password_", "sentinel_password_")))
            except TierError as error:
                errors.append(error)
            else:
                return endpoint
            self._sentinels.remove(sentinel)
            self._sentinels.append(sentinel)
        reasons = "; ".join(map(str, errors))
        raise TierUnavailableError(f"no sentinel reports the master {self._service!r}: {reasons}")

    async def _ask(self, sentinel: Endpoint) -> Endpoint:
        connection = await self._dialer.dial(sentinel, self._contacted)
        try:
            message = encode(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
            [reply] = await connection.call(message, 1)
        finally:
            connection.abort()
        if isinstance(reply, ErrorReply):
            raise refusal(connection.where, reply)
        if not (isinstance(reply, list) and len(reply) == 2):
            raise TierUnavailableError(
                f"{connection.where} does not know a master {self._service!r}: check sentinel_service"
            )
        host, port = reply
        if not (isinstance(host, bytes) and isinstance(port, bytes) and port.isdigit()):
            raise TierUnavailableError(f"{connection.where} reports an invalid address of the master")
        return Endpoint(host.decode("utf-8", "replace"), int(port))


SLOTS = 16384
REFRESH_S = 0.5
"""Shortest time between requests for the table. Each MOVED corrects its own slot at once."""


def slot_of(name: bytes) -> int:
    """Return the slot of a name without braces."""
    return binascii.crc_hqx(name, 0) % SLOTS


def parse_slots(reply: Reply, asked: Endpoint) -> list[Endpoint | None]:
    """Return the master of each slot from the reply to CLUSTER SLOTS; None for slots without one.

    Args:
        reply: The reply.
        asked: The node that sent it, whose host is used for addresses without one.

    Raises:
        ValueError: The reply has another form.
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

    The table of slots is requested on first use, and again before the next call after a node redirected a
    command or could not be reached. Until then the old table is used.

    Args:
        seeds: Nodes to ask first.
        make_node: Creates nodes.
        timeout_s: Longest time to get a table, in seconds.
    """

    def __init__(self, seeds: Sequence[Endpoint], make_node: MakeNode, *, timeout_s: float) -> None:
        super().__init__(make_node, timeout_s)
        self._seeds = tuple(seeds)
        self._table: list[Endpoint | None] | None = None
        self._stale = True
        self._refreshed = float("-inf")
        self._refreshing = asyncio.Lock()

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        table = await self._current()
        endpoints = [table[slot_of(name)] for name in names]
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

    def classify(self, node: Node, error: TierError) -> TierError:
        others = (self._nodes.get(endpoint) for endpoint in dict.fromkeys(self._table or ()) if endpoint)
        others_serve = any(other is not None and other is not node and not other.failed for other in others)
        if others_serve and isinstance(error, TierUnavailableError):
            return TierPartUnavailableError(str(error))
        return error

    def note_failure(self) -> None:
        self._stale = True

    async def _current(self) -> list[Endpoint | None]:
        """Return the table of slots, requested again if it may have changed.

        Raises:
            TierUnavailableError: There is no table yet, and no node sends one.
        """
        if self._table is None:
            async with self._find_deadline(), self._refreshing:
                if self._table is None:
                    return await self._refresh()
        now = asyncio.get_running_loop().time()
        if self._stale and now >= self._refreshed + REFRESH_S and not self._refreshing.locked():
            with contextlib.suppress(TierUnavailableError):
                async with self._find_deadline(), self._refreshing:
                    return await self._refresh()
        return self._table

    def _find_deadline(self) -> contextlib.AbstractAsyncContextManager[None]:
        return deadline(self._timeout_s, "the cluster", "table of slots", FIND_OPTION)

    async def _refresh(self) -> list[Endpoint | None]:
        self._refreshed = asyncio.get_running_loop().time()
        errors: list[TierError] = []
        nodes = [self.node(endpoint) for endpoint in dict.fromkeys([*self._nodes, *self._seeds])]
        for node in sorted(nodes, key=lambda node: node.suspended):
            try:
                [reply] = await node.call(encode(b"CLUSTER", b"SLOTS"), 1)
                if isinstance(reply, ErrorReply):
                    raise refusal(node.where, reply)
                return self._learn(parse_slots(reply, node.endpoint))
            except ValueError as error:
                errors.append(TierError(f"{node.where}: {error}"))
            except TierError as error:
                errors.append(error)
        reasons = "; ".join(map(str, errors))
        raise TierUnavailableError(f"no node sends the slots of the cluster: {reasons}")

    def _learn(self, table: list[Endpoint | None]) -> list[Endpoint | None]:
        self._table, self._stale = table, False
        self.keep({endpoint for endpoint in dict.fromkeys(table) if endpoint is not None})
        return table


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and TLS context for the servers."""

    credentials: Credentials
    sentinel_credentials: Credentials
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, config: ValkeyConfig) -> Self:
        """Read the files and variables that the config names.

        Raises:
            ConfigError: One of them cannot be used.
        """
        return cls(
            Credentials.read(config), Credentials.read(config, sentinel=True), make_tls_context(config)
        )


def make_topology(config: ValkeyConfig, access: Access) -> Topology:
    """Create the topology of a config, without connecting."""
    endpoints = config.address.endpoints
    find_s = 2 * config.lookup_timeout_s
    if config.effective_mode == "sentinel":
        sentinels = Dialer(access.sentinel_credentials, access.tls, config.connect_timeout_s, kind="sentinel")
        make_node = _node_maker(config, access, master_only=True)
        return SentinelServer(endpoints, config.sentinel_service, sentinels, make_node, timeout_s=find_s)
    if config.effective_mode == "cluster":
        return Cluster(endpoints, _node_maker(config, access, pause_s=config.node_pause_s), timeout_s=find_s)
    return SingleServer(endpoints[0], _node_maker(config, access))


def _node_maker(
    config: ValkeyConfig, access: Access, *, master_only: bool = False, pause_s: float = 0.0
) -> MakeNode:
    dialer = Dialer(
        access.credentials,
        access.tls,
        config.connect_timeout_s,
        database=config.address.database,
        master_only=master_only,
    )

    def make(endpoint: Endpoint, on_failure: Callable[[], None]) -> Node:
        return Node(
            endpoint,
            dialer,
            connections=config.connections,
            lookup_timeout_s=config.lookup_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
            pause_s=pause_s,
            on_failure=on_failure,
        )

    return make
