"""The status endpoint. aiohttp, which is an extra, is imported when a server is made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from lmcache_async.config import HTTPConfig
from lmcache_async.errors import LMCacheAsyncError, MissingDependencyError
from lmcache_async.metrics.charts import Source
from lmcache_async.metrics.http import AccessTokens

if TYPE_CHECKING:
    from lmcache_async.metrics.server import StatusServer


def status_server(source: Source, config: HTTPConfig, *, rank: int = 0) -> StatusServer:
    """Return a server of the source that does not listen yet. `config.listen` must be set."""
    return _server_class()(source, config, rank=rank)


def check_endpoint(config: HTTPConfig) -> Iterator[str]:
    """Yield a message for each problem with which the server would not start. No socket is opened."""
    if config.listen is None:
        return
    for made in (_server_class, config.make_context, partial(AccessTokens.read, config.token_file)):
        try:
            made()
        except LMCacheAsyncError as error:
            yield from str(error).split("\n")


def _server_class() -> type[StatusServer]:
    try:
        from lmcache_async.metrics.server import StatusServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise MissingDependencyError(
            "http.listen needs the package aiohttp, which is not installed: pip install 'lmcache-async[http]'"
        ) from None
    return StatusServer
