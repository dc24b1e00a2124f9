"""Checks of the host tier for `lmcache-async doctor`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from lmcache_async.plugins.host import HostConfig, HostTier
from lmcache_async.plugins.host.diagnosis import check_huge_pages
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.diagnosis import Check, Outcome
from tests.support.daemons import ThreadedDaemon, host_tier, socket_path
from tests.support.processes import wait_until


def diagnosed(**options: object) -> dict[str, Check]:
    return {check.name: check for check in HostTier(HostConfig(**options)).diagnose()}


async def ask(path: Path) -> None:
    async with host_tier(path) as tier:
        assert not await tier.contains(key_of(1))


def test_the_daemon_is_checked_at_its_socket():
    with socket_path() as path:
        with ThreadedDaemon(path) as daemon:
            found = diagnosed(socket=path)["daemon"]
            distrusted = diagnosed(socket=path, daemon_uid=os.getuid() + 1)["daemon"]
            # The daemon has accepted and closed the connections of the checks before it is stopped.
            asyncio.run(ask(path))
            wait_until(lambda: daemon.call(lambda: not daemon.daemon._greetings))
        gone = diagnosed(socket=path)["daemon"]

    assert found.outcome is Outcome.OK
    assert found.found == f"process {os.getpid()} of user {os.getuid()} listens at {path}"
    assert (distrusted.outcome, distrusted.found) == (Outcome.WARN, found.found)
    assert gone.outcome is Outcome.FAIL
    assert gone.todo.startswith("start it: lmcache-async serve")


@pytest.mark.parametrize(
    ("text", "outcome", "found"),
    [
        ("always within_size [advise] never\n", Outcome.OK, "shmem_enabled is advise"),
        ("always [never]\n", Outcome.WARN, "shmem_enabled is never"),
        (None, Outcome.WARN, "shmem_enabled is unknown"),
    ],
)
def test_huge_pages_of_shared_memory(tmp_path, text, outcome, found):
    file = tmp_path / "shmem_enabled"
    if text is not None:
        file.write_text(text)

    check = check_huge_pages(file)

    assert (check.outcome, check.found) == (outcome, found)
    assert check.todo == (
        ""
        if outcome is Outcome.OK
        else f"echo advise > {'/sys/kernel/mm/transparent_hugepage/shmem_enabled'} (as root)"
    )
