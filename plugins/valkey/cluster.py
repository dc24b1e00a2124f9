"""A cluster: 16384 slots, each a master's; learnt from any node, and again when it changes."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
from collections.abc import Sequence

from lmcache_async.config.endpoint import Endpoint
from lmcache_async.errors import TierError, TierPartUnavailableError, TierUnavailableError
from lmcache_async.plugins.valkey.topology import FIND_OPTION, MakeNode, Topology
from lmcache_async.resp.answers import refusal
from lmcache_async.resp.connection import deadline
from lmcache_async.resp.node import Node
from lmcache_async.resp.wire import ErrorReply, Reply, encode

SLOTS = 16384
REFRESH_S = 0.5
"""The table is not asked for more often; each MOVED corrects its own slot at once."""


def slot_of(name: bytes) -> int:
    """The slot of a name without braces."""
    return binascii.crc_hqx(name, 0) % SLOTS


def parse_slots(reply: Reply, asked: Endpoint) -> list[Endpoint | None]:
    """The master of each slot, from the answer to CLUSTER SLOTS; None where a slot has none.

    Args:
        reply: The answer.
        asked: Who gave it: the host meant where an address has none.

    Raises:
        ValueError: It is no such answer.
    """
    table: list[Endpoint | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else [reply]:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                text = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
                master = Endpoint(asked.host if text in {"", "?"} else text, port)
                table[first : last + 1] = [master] * (last + 1 - first)
            case _:
                raise ValueError("expected first and last slot and a master's address in each entry")
    return table


def parse_redirect(text: str, asked: Endpoint | None = None) -> tuple[int, Endpoint] | None:
    """Slot and endpoint of `MOVED 42 host:port` or `ASK ...`; None where it is neither."""
    words = text.split()
    if len(words) != 3 or not words[1].isdigit() or int(words[1]) >= SLOTS:
        return None
    host, _, port = words[2].rpartition(":")
    host = host.strip("[]") or (asked.host if asked else "")
    return (int(words[1]), Endpoint(host, int(port))) if host and port.isdigit() else None


class Cluster(Topology):
    """Keys spread over masters by their slots.

    The table is asked for when it is first needed, and again, before a later call, after a node sent us
    elsewhere or could not be reached. Meanwhile the old one is used.

    Args:
        seeds: Nodes to begin with.
        make_node: Makes nodes.
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
        return [self._nobody() if endpoint is None else self.node(endpoint) for endpoint in endpoints]

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

    def blame(self, node: Node, error: TierError) -> TierError:
        others = (self._nodes.get(endpoint) for endpoint in dict.fromkeys(self._table or ()) if endpoint)
        serves_on = any(other is not None and other is not node and not other.failed for other in others)
        if serves_on and isinstance(error, TierUnavailableError):
            return TierPartUnavailableError(str(error))
        return error

    def trouble(self) -> None:
        self._stale = True

    async def _current(self) -> list[Endpoint | None]:
        """The table, asked for again if it may have changed.

        Raises:
            TierUnavailableError: There is none yet, and no node tells.
        """
        if self._table is None:
            async with self._in_time(), self._refreshing:
                if self._table is None:
                    return await self._refresh()
        now = asyncio.get_running_loop().time()
        if self._stale and now >= self._refreshed + REFRESH_S and not self._refreshing.locked():
            with contextlib.suppress(TierUnavailableError):
                async with self._in_time(), self._refreshing:
                    return await self._refresh()
        return self._table

    def _in_time(self) -> contextlib.AbstractAsyncContextManager[None]:
        return deadline(self._timeout_s, "the cluster", "table of slots", FIND_OPTION)

    async def _refresh(self) -> list[Endpoint | None]:
        self._refreshed = asyncio.get_running_loop().time()
        errors: list[TierError] = []
        nodes = [self.node(endpoint) for endpoint in dict.fromkeys([*self._nodes, *self._seeds])]
        for node in sorted(nodes, key=lambda node: node.in_trouble):
            try:
                [reply] = await node.call(encode(b"CLUSTER", b"SLOTS"), 1)
                if isinstance(reply, ErrorReply):
                    raise refusal(node.where, reply)
                return self._learn(parse_slots(reply, node.endpoint))
            except ValueError as error:
                errors.append(TierError(f"{node.where}: {error}"))
            except TierError as error:
                errors.append(error)
        told = "; ".join(map(str, errors))
        raise TierUnavailableError(f"no node tells the slots of the cluster: {told}")

    def _learn(self, table: list[Endpoint | None]) -> list[Endpoint | None]:
        self._table, self._stale = table, False
        self.keep({endpoint for endpoint in dict.fromkeys(table) if endpoint is not None})
        return table

    @staticmethod
    def _nobody() -> TierError:
        return TierUnavailableError("no node of the cluster has the key's slot: see CLUSTER SHARDS")
