"""`lmcache-async doctor`: what there is, what is wrong with it, and what to do."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lmcache_async.cli.checks import machine, versions
from lmcache_async.cli.checks.check import Check, Outcome, fail, guarded, ok, warn
from lmcache_async.cli.checks.daemon import check_daemon
from lmcache_async.cli.checks.disk import check_folder, folder_of
from lmcache_async.cli.checks.probe import check_tier, probe_timeout_s
from lmcache_async.cli.output import PROBLEM, JSONFlag, plain_lines, print_json, refuse
from lmcache_async.config import EngineConfig, load_config, parse_size, survey_config
from lmcache_async.engine.check import all_problems, make_tier, persistent_tiers
from lmcache_async.registry import Registry

LOCAL_S = 30.0  # for what asks this machine alone
DISK_S = 90.0

Group = tuple[str, float, Callable[[], Iterable[Check]]]


def doctor_command(
    config: Annotated[
        Path | None,
        typer.Option(
            help="The engine's YAML file; by default the one that the environment names.", dir_okay=False
        ),
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Measure disks by writing and reading a sample.")
    ] = True,
    sample: Annotated[str, typer.Option(help="Size of that sample.")] = "256MiB",
    as_json: JSONFlag = False,
) -> None:
    """Look at the environment, the machine, the config and each of its tiers, and say what to do.

    Ends with 1 if something cannot work; warnings are no failure. Nothing that is stored is changed, but one
    small record is put into each remote tier and removed again.
    """
    try:
        sample_bytes = parse_size(sample) if speed else None
    except ValueError as error:
        refuse(f"--sample is {sample!r}: {error}")
    logging.getLogger("lmcache_async").addHandler(logging.NullHandler())  # the checks say it
    checks: list[Check] = []
    hung = False
    for name, seconds, work in groups(config, sample_bytes):
        found, late = guarded(name, seconds, work)
        hung |= late
        checks += found
        if not as_json:
            for check in found:
                _print(check)
    failed = any(check.outcome is Outcome.FAIL for check in checks)
    if as_json:
        print_json({"checks": [check.as_dict() for check in checks], "ok": not failed})
    else:
        counts = {outcome: sum(check.outcome is outcome for check in checks) for outcome in Outcome}
        typer.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if hung:  # a thread of a check still waits, and would be waited for
        sys.stdout.flush()
        os._exit(PROBLEM)
    if failed:
        raise typer.Exit(PROBLEM)


def groups(file: Path | None, sample_bytes: int | None) -> Iterator[Group]:
    """The checks in the order in which they are made, each with its deadline."""
    yield "versions", LOCAL_S, versions.check_versions
    yield "vllm plug-in", versions.VLLM_TIMEOUT_S + 5, versions.check_plugin
    yield "compiled module", LOCAL_S, versions.check_compiled
    registry = Registry()
    read: list[EngineConfig] = []
    yield "config", LOCAL_S, partial(_check_config, file, registry, read)
    config = read[0] if read else load_config(env={})
    yield "cores", LOCAL_S, partial(machine.check_cores, config)
    yield "memory", LOCAL_S, partial(machine.check_memory, config)
    yield "pinned memory", LOCAL_S, partial(_check_pinning, config)
    yield "huge pages", LOCAL_S, partial(machine.check_huge_pages, config)
    yield "shared memory", LOCAL_S, machine.check_shared_memory
    yield "open files", LOCAL_S, machine.check_open_files
    yield "daemon", LOCAL_S, partial(check_daemon, config)
    yield "restart", LOCAL_S, partial(_check_restart, config, registry)
    yield from _tier_groups(config, registry, sample_bytes)


def _tier_groups(config: EngineConfig, registry: Registry, sample_bytes: int | None) -> Iterator[Group]:
    for spec in config.tiers:
        try:
            tier = make_tier(spec, registry, third_party=config.plugins.third_party)
        except Exception:  # noqa: BLE001, S112 - told by the check of the config already
            continue
        folder = folder_of(spec.id, tier)
        if folder is not None:
            yield f"disk ({spec.id})", DISK_S, partial(check_folder, folder, sample_bytes=sample_bytes)
        elif not tier.capabilities.in_arena:
            yield f"tier ({spec.id})", probe_timeout_s(spec), partial(check_tier, spec, tier)


def _check_config(file: Path | None, registry: Registry, read: list[EngineConfig]) -> list[Check]:
    """What is wrong with it; it goes into `read` where it can be."""
    todo = "see docs/config.md, or lmcache-async tiers for the options of each tier"
    loaded = survey_config(file)
    if not loaded.problems:
        read.append(loaded.config)
    wrong = [fail("config", line, todo) for line in all_problems(loaded, registry)]
    source = file or next((origin.name for origin in loaded.origins.values()), "all defaults")
    return wrong or [ok("config", f"nothing is wrong ({source})")]


def _check_restart(config: EngineConfig, registry: Registry) -> Iterator[Check]:
    """The flag of vLLM's that a restart without loss needs; whether it is given cannot be seen from here."""
    if tiers := persistent_tiers(config, registry):
        found = f"{', '.join(tiers)}: content outlives the process; what waits to be written at a stop may be lost"
        todo = "start vLLM with --shutdown-timeout 30: by default it kills its workers at once"
        yield Check("restart", Outcome.OK, found, todo)
        closing_s, queue_s = config.shutdown_timeout_s, config.store.max_pending_write_s
        if closing_s < queue_s:
            found = f"closing waits {closing_s:g} s (shutdown_timeout_s) for a queue of up to {queue_s:g} s (store.max_pending_write_s)"
            yield warn("restart", found, "raise shutdown_timeout_s, or lower store.max_pending_write_s")


def _check_pinning(config: EngineConfig) -> Iterator[Check]:
    import torch

    yield from machine.check_pinning(config, has_cuda=torch.cuda.is_available())


def _print(check: Check) -> None:
    typer.echo(plain_lines(f"{check.outcome:<4}  {check.name}: {check.found}"))
    if check.todo:
        typer.echo(f"      {check.todo}")
