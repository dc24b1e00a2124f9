"""What the daemon's answers come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from lmcache_async.daemon.messages import MAX_ITEMS, ProtocolError, Refusal
from lmcache_async.errors import TierError, TierFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_async.daemon.messages import Grant
    from lmcache_async.plugins.host.connection import Connection

T = TypeVar("T")

TOO_MUCH = "this engine has leases of as many of the daemon's bytes as it may have"


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many as fit into one message, and so on."""
    for start in range(0, len(items), MAX_ITEMS):
        yield items[start : start + MAX_ITEMS]


def parsed(connection: Connection, parse: Callable[[], T]) -> T:
    """What `parse` makes of an answer.

    Raises:
        TierUnavailableError: It is no answer to what was asked; the connection ends.
    """
    try:
        return parse()
    except ProtocolError as error:
        raise connection.fail(error) from error


def outcome_of(grant: Grant) -> TierError | None:
    """What a put comes to that needs no copy, or finds no memory."""
    if grant.lease or grant.refusal is Refusal.PRESENT:
        return None
    if grant.refusal is Refusal.TOO_MUCH:
        return TierFullError(TOO_MUCH)
    return TierFullError("the daemon's pool has no room for the chunk")


def leases_of(grants: Sequence[Grant]) -> list[int]:
    """The numbers of the leases among them."""
    return [grant.lease for grant in grants if grant.lease]
