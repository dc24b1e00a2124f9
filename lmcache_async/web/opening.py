"""The door to the server, whose package may not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.errors import MissingDependencyError

if TYPE_CHECKING:
    from lmcache_async.config import HTTPConfig
    from lmcache_async.web.server import StatusServer
    from lmcache_async.web.source import Source


def status_server(source: Source, config: HTTPConfig, *, rank: int = 0) -> StatusServer:
    """A server of the source, not listening yet; `config.listen` is set.

    Raises:
        ConfigError: A file that the config names cannot be used.
        MissingDependencyError: aiohttp is not installed.
    """
    try:
        from lmcache_async.web.server import StatusServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise MissingDependencyError(
            "http.listen needs the package aiohttp, which is not installed: pip install 'lmcache-async[http]'"
        ) from None
    return StatusServer(source, config, rank=rank)
