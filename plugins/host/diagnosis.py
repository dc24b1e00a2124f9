"""Checks of the daemon that a host tier uses, and of the huge pages of its pool. Blocking."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from lmcache_async.daemon.address import check_directory, default_socket, peer_of
from lmcache_async.errors import ConfigError
from lmcache_async.plugins.host.config import HostConfig
from lmcache_async.tiers.diagnosis import Check, fail, ok, warn

_CONNECT_S = 2.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def check_daemon(config: HostConfig) -> Check:
    """Connect to the daemon and compare its user with the trusted ones."""
    name, path = "daemon", config.socket or default_socket()
    start = f"start it: lmcache-async serve --max-bytes 20GiB --socket {path}"
    try:
        check_directory(path, make=False)
    except ConfigError as error:
        return fail(name, str(error), "name another socket, in the config and for lmcache-async serve")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(str(path))
            process, user = peer_of(connection)
        except FileNotFoundError:
            return fail(name, f"there is no socket {path}", start)
        except OSError as error:
            return fail(name, f"no answer at {path}: {error.strerror or error}", start)
    found = f"process {process} of user {user} listens at {path}"
    if user not in config.trusted_users:
        return warn(name, found, f"set daemon_uid: {user} in the tier's options, if that user is trusted")
    return ok(name, found)


def check_huge_pages(file: Path = _HUGE_PAGES) -> Check:
    """Check whether the kernel gives huge pages to shared memory."""
    name = "huge pages of shared memory"
    try:
        match = re.search(r"\[(\w+)\]", file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        match = None
    found = f"{file.name} is {match[1] if match else 'unknown'}"
    if match is None or match[1] in {"never", "deny"}:
        return warn(name, found, f"echo advise > {_HUGE_PAGES} (as root)")
    return ok(name, found)
