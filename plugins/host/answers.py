"""Parsing of the daemon's answers: batches, protocol errors and refusals."""

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
    """Yield the items in batches of at most `MAX_ITEMS`, the limit of a message."""
    for start in range(0, len(items), MAX_ITEMS):
        yield items[start : start + MAX_ITEMS]


def parsed(connection: Connection, parse: Callable[[], T]) -> T:
    """Return the result of `parse`, which decodes an answer.

    Raises:
        TierUnavailableError: The answer does not match the request. The connection is closed.
    """
    try:
        return parse()
    except ProtocolError as error:
        raise connection.fail(error) from error


def outcome_of(grant: Grant) -> TierError | None:
    """Return the result of a put from its grant; None if memory was granted or the record exists."""
    if grant.lease or grant.refusal is Refusal.PRESENT:
        return None
    if grant.refusal is Refusal.TOO_MUCH:
        return TierFullError(TOO_MUCH)
    return TierFullError("the daemon's pool has no room for the chunk")


def leases_of(grants: Sequence[Grant]) -> list[int]:
    """Return the numbers of the granted leases."""
    return [grant.lease for grant in grants if grant.lease]
