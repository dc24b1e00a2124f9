"""The daemon of this host: whether its socket is there, answers, and is the right user's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from lmcache_async.cli.checks.check import Check, fail, ok, warn
from lmcache_async.config import EngineConfig
from lmcache_async.daemon.address import check_directory, default_socket, peer_of
from lmcache_async.errors import ConfigError

CONNECT_S = 2.0


def check_daemon(config: EngineConfig) -> Iterator[Check]:
    """Of each tier `host`; without one, of the default socket where there is something."""
    given = [tier.options.get("socket") for tier in config.tiers if tier.name == "host"]
    for path in dict.fromkeys(given):
        yield _check(Path(str(path)) if path else default_socket(), needed=True)
    if not given and default_socket().exists():
        yield _check(default_socket(), needed=False)


def _check(path: Path, *, needed: bool) -> Check:
    name, start = "daemon", f"start it: lmcache-async serve --max-bytes 20GiB --socket {path}"
    worse = fail if needed else warn
    try:
        check_directory(path, make=False)
    except ConfigError as error:
        return worse(name, str(error), "name another socket, in the config and for lmcache-async serve")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(str(path))
            process, user = peer_of(connection)
        except FileNotFoundError:
            return worse(name, f"there is no socket {path}", start)
        except OSError as error:
            return worse(name, f"nobody answers at {path}: {error.strerror or error}", start)
    found = f"process {process} of user {user} listens at {path}"
    if user not in {0, os.getuid()}:
        return warn(name, found, f"set daemon_uid: {user} in the tier's options, if that user is trusted")
    return ok(name, found)
