"""Which server has a key: one server, or the master that Sentinel names. The cluster is in a file of its own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_async.config.endpoint import Endpoint
from lmcache_async.errors import TierClosedError, TierError, TierUnavailableError
from lmcache_async.resp.answers import refusal
from lmcache_async.resp.connection import deadline
from lmcache_async.resp.dialer import RefusedCredentialsError
from lmcache_async.resp.node import Node
from lmcache_async.resp.wire import ErrorReply, encode

if TYPE_CHECKING:
    from lmcache_async.resp.connection import Connection
    from lmcache_async.resp.dialer import Dialer

FIND_OPTION = "twice lookup_timeout_s"
"""What bounds finding out who has what: one server that hangs, and time for the next."""

MakeNode = Callable[[Endpoint, Callable[[], None]], Node]
"""A node for an endpoint; the callable is its `on_trouble`."""


class Topology(ABC):
    """Finds the node of a key, and finds it again when nodes change."""

    def __init__(self, make_node: MakeNode, timeout_s: float = 0.0) -> None:
        self._make_node = make_node
        self._timeout_s = timeout_s  # of finding out who has what
        self._nodes: dict[Endpoint, Node] = {}
        self._old: list[Node] = []  # with connections in use at last sight
        self._closed = False

    @abstractmethod
    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        """The node of each name, or why there is none.

        Raises:
            TierUnavailableError: Nobody can say.
        """

    @abstractmethod
    async def masters(self) -> list[Node]:
        """All nodes that have names of their own.

        Raises:
            TierUnavailableError: Nobody can say.
        """

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        """Where a refusal sends us, and whether as a guest (ASKING); None where it is just a refusal."""
        del name, reply
        return None

    def blame(self, node: Node, error: TierError) -> TierError:
        """The error of the whole that this one of a node is."""
        del node
        return error

    def close(self) -> None:
        """Close all connections; calls under way fail with TierClosedError."""
        self._closed = True
        for node in [*self._nodes.values(), *self._old]:
            node.close()

    async def wait_closed(self) -> None:
        for node in [*self._nodes.values(), *self._old]:
            await node.wait_closed()

    def trouble(self) -> None:
        """A node could not be reached or did not answer."""

    def node(self, endpoint: Endpoint) -> Node:
        """The node there, made when it is new."""
        if self._closed:
            raise TierClosedError("the valkey tier was closed")
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = self._make_node(endpoint, self.trouble)
        return node

    def keep(self, endpoints: set[Endpoint]) -> None:
        """Retire the nodes that are none of these."""
        self._old = [node for node in self._old if not node.unused]
        for endpoint in self._nodes.keys() - endpoints:
            node = self._nodes.pop(endpoint)
            node.retire()
            self._old.append(node)


class SingleServer(Topology):
    """One server has everything."""

    def __init__(self, endpoint: Endpoint, make_node: MakeNode) -> None:
        super().__init__(make_node)
        self._endpoint = endpoint

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        return [self.node(self._endpoint)] * len(names)

    async def masters(self) -> list[Node]:
        return [self.node(self._endpoint)]


class SentinelServer(Topology):
    """The master that one of the Sentinels names; asked again after any trouble with it.

    Args:
        sentinels: Asked one after the other; one that does not answer is the last the next time.
        service: The master's name there.
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
        self._asked: set[Connection] = set()
        self._asking = asyncio.Lock()

    async def route(self, names: Sequence[bytes]) -> list[Node | TierError]:
        return [await self._find()] * len(names)

    async def masters(self) -> list[Node]:
        return [await self._find()]

    def follow(self, name: bytes, reply: ErrorReply) -> tuple[Node, bool] | None:
        """The master has become a replica: the next call asks for the new one."""
        if reply.code in {"READONLY", "MASTERDOWN", "FAILOVER"}:
            self.trouble()
        return None

    def trouble(self) -> None:
        self._master = None

    def close(self) -> None:
        super().close()
        for connection in self._asked:
            connection.abort(TierClosedError("the valkey tier was closed"))

    async def wait_closed(self) -> None:
        await super().wait_closed()
        for connection in tuple(self._asked):
            await connection.wait_closed()

    async def _find(self) -> Node:
        where = f"the master {self._service!r}"
        async with deadline(self._timeout_s, where, "sentinel that names it", FIND_OPTION), self._asking:
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
        told = "; ".join(map(str, errors))
        raise TierUnavailableError(f"no sentinel names the master {self._service!r}: {told}")

    async def _ask(self, sentinel: Endpoint) -> Endpoint:
        connection = await self._dialer.dial(sentinel, self._asked)
        try:
            message = encode(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
            [reply] = await connection.call(message, 1)
        finally:
            connection.abort()
        if isinstance(reply, ErrorReply):
            raise refusal(connection.where, reply)
        if not (isinstance(reply, list) and len(reply) == 2):
            raise TierUnavailableError(
                f"{connection.where} knows no master {self._service!r}: see sentinel_service"
            )
        host, port = reply
        if not (isinstance(host, bytes) and isinstance(port, bytes) and port.isdigit()):
            raise TierUnavailableError(f"{connection.where} names a master that is no address")
        return Endpoint(host.decode("utf-8", "replace"), int(port))
