"""The door to the server, whose package may not be there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lmcache_async.errors import LMCacheAsyncError, MissingDependencyError
from lmcache_async.web.access import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_async.config import HTTPConfig
    from lmcache_async.web.server import StatusServer
    from lmcache_async.web.source import Source


def status_server(source: Source, config: HTTPConfig, *, rank: int = 0) -> StatusServer:
    """A server of the source, not listening yet; `config.listen` is set.

    Raises:
        ConfigError: A file that the config names cannot be used.
        MissingDependencyError: aiohttp is not installed.
    """
    return _server_class()(source, config, rank=rank)


def check_endpoint(config: HTTPConfig) -> Iterator[str]:
    """A line for each thing that would keep a server of this config from being made; nothing listens."""
    if config.listen is None:
        return
    for made in (_server_class, config.make_context, partial(Tokens.read, config.token_file)):
        try:
            made()
        except LMCacheAsyncError as error:
            yield from str(error).split("\n")


def _server_class() -> type[StatusServer]:
    try:
        from lmcache_async.web.server import StatusServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise MissingDependencyError(
            "http.listen needs the package aiohttp, which is not installed: pip install 'lmcache-async[http]'"
        ) from None
    return StatusServer
