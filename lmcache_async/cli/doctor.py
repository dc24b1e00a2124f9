"""`lmcache-async doctor`: check the environment, the machine, the configuration and its tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lmcache_async.cli import checks as host
from lmcache_async.cli.output import PROBLEM, STOPPED, JSONFlag, end_process, print_json, refuse, say
from lmcache_async.cli.probe import probe_tier, probe_timeout_s
from lmcache_async.config import EngineConfig, load_config, parse_size, survey_config
from lmcache_async.engine.check import all_problems, tier_capabilities
from lmcache_async.engine.tiers import make_tier
from lmcache_async.registry import Registry
from lmcache_async.tiers.base import Medium
from lmcache_async.tiers.diagnosis import Check, Outcome, fail, ok, warn

LOCAL_S = 30.0  # for checks of this machine only
TIER_S = 90.0

Group = tuple[str, float, Callable[[], Iterable[Check]]]
"""Name, deadline in seconds and checks."""


def doctor_command(
    config: Annotated[
        Path | None,
        Option(
            help="Config file of the engine; by default the file that the environment names.", dir_okay=False
        ),
    ] = None,
    speed: Annotated[
        bool, Option("--speed/--no-speed", help="Measure disks by writing and reading a sample.")
    ] = True,
    sample: Annotated[str, Option(help="Size of the sample.")] = "256MiB",
    as_json: JSONFlag = False,
) -> None:
    """Check the environment, the machine, the configuration and each of its tiers, and advise what to do.

    Exits with 1 if something cannot work; warnings do not count. Stored records are not changed. One small
    record is stored in each remote tier and removed again.
    """
    try:
        sample_bytes = parse_size(sample) if speed else None
    except ValueError as error:
        refuse(f"--sample is {sample!r}: {error}")
    logging.getLogger("lmcache_async").addHandler(logging.NullHandler())  # the checks report the errors
    checks: list[Check] = []
    hung = False
    for name, seconds, work in groups(config, sample_bytes):
        try:
            found, late = run_checks(name, seconds, work)
        except KeyboardInterrupt:
            end_process(STOPPED)
        hung |= late
        checks += found
        if not as_json:
            for check in found:
                say(f"{check.outcome:<4}  {check.name}: {check.found}")
                if check.todo:
                    say(f"      {check.todo}")
    failed = any(check.outcome is Outcome.FAIL for check in checks)
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "ok": not failed})
    else:
        counts = {outcome: sum(check.outcome is outcome for check in checks) for outcome in Outcome}
        say(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if hung:  # the interpreter would wait for the thread of the check
        end_process(PROBLEM)
    if failed:
        raise typer.Exit(PROBLEM)


def groups(file: Path | None, sample_bytes: int | None) -> Iterator[Group]:
    yield "versions", LOCAL_S, host.check_versions
    yield "vllm plug-in", host.VLLM_TIMEOUT_S + 5, host.check_plugin
    yield "compiled module", LOCAL_S, lambda: [host.check_compiled()]
    registry = Registry()
    read: list[EngineConfig] = []
    yield "config", LOCAL_S, partial(_check_config, file, registry, read)
    config = read[0] if read else load_config(env={})
    for name, check in host.MACHINE.items():
        yield name, LOCAL_S, partial(lambda check: [check(config)], check)
    yield "restart", LOCAL_S, partial(_check_restart, config, registry)
    for spec in config.tiers:
        try:
            tier = make_tier(spec, registry, third_party=config.plugins.third_party)
        except Exception:  # noqa: BLE001, S112 - reported by the check of the configuration
            continue
        diagnose = partial(tier.diagnose, sample_bytes=sample_bytes)
        yield f"tier ({spec.id})", TIER_S, partial(_named, spec.id, diagnose)
        if not (tier.capabilities.in_arena or tier.capabilities.medium is Medium.DISK):
            yield (
                f"tier ({spec.id})",
                probe_timeout_s(spec),
                partial(_named, spec.id, partial(probe_tier, spec, tier)),
            )


def run_checks(name: str, seconds: float, work: Callable[[], Iterable[Check]]) -> tuple[list[Check], bool]:
    """Run a group of checks in a thread; return its results and whether it exceeded its deadline.

    An exception becomes a failed check. A thread that exceeds the deadline is abandoned. After Ctrl-C, the check gets
    the same time to end, so that it removes what it has written; a second Ctrl-C ends this wait.
    """
    future = ThreadPoolExecutor(1, thread_name_prefix="lmcache-async-check").submit(lambda: list(work()))
    try:
        done = wait([future], timeout=seconds).done
    except KeyboardInterrupt:
        text = f"stopping when the check {name} ends, within {seconds:g} s; Ctrl-C again stops at once"
        say(text, to_stderr=True)
        wait([future], timeout=seconds)
        raise
    if not done:
        found = f"the check did not end within {seconds:g} s"
        return [fail(name, found, "check whether the disk or server behind it responds")], True
    if (error := future.exception()) is None:
        return future.result(), False
    text = f"{type(error).__name__}: {error!s:.300}"
    return [fail(name, f"the check itself failed: {text}", "report this line as a bug")], False


def _check_config(file: Path | None, registry: Registry, read: list[EngineConfig]) -> list[Check]:
    """Check the configuration. Append it to `read` unless a key or value is invalid; options of plug-ins may be."""
    todo = "see docs/config.md, or lmcache-async tiers for the options of each tier"
    loaded = survey_config(file)
    wrong = [fail("config", line, todo) for line in all_problems(loaded, registry)]
    if not loaded.problems:  # not reached if the import of a plug-in blocks
        read.append(loaded.config)
    source = file or next(iter(loaded.origin.places.values()), "all defaults").partition(", line ")[0]
    return wrong or [ok("config", f"valid ({source})")]


def _check_restart(config: EngineConfig, registry: Registry) -> Iterator[Check]:
    """Name vLLM's option for a restart without loss. Whether vLLM is started with it cannot be checked here."""
    capabilities = tier_capabilities(config, registry)
    if tiers := [name for name, each in capabilities.items() if each.persistent]:
        found = f"{', '.join(tiers)}: content survives a restart, but writes still queued may be lost"
        todo = "start vLLM with --shutdown-timeout 30: by default it kills its workers immediately"
        yield Check("restart", Outcome.OK, found, todo)
        closing_s, queue_s = config.shutdown_timeout_s, config.store.max_pending_write_s
        if closing_s < queue_s:
            found = f"closing waits {closing_s:g} s (shutdown_timeout_s) for a queue of up to {queue_s:g} s (store.max_pending_write_s)"
            yield warn("restart", found, "raise shutdown_timeout_s, or lower store.max_pending_write_s")


def _named(tier: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Add the id of the tier to the names."""
    for check in checks():
        yield replace(check, name=f"{check.name} ({tier})")
