"""`lmcache-async bench`: measure memory, disk and one tier, and compare each with its physical limit."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.progress import TimeElapsedColumn

from lmcache_async.bench.measure import DEFAULT_ROUNDS, QUICK_ROUNDS, Frame, Measure, document, run
from lmcache_async.cli.output import progress, refuse, say
from lmcache_async.cli.tiers import complete_tiers
from lmcache_async.config import TierSpec, load_config
from lmcache_async.errors import LMCacheAsyncError
from lmcache_async.maintenance.stores import named_tier

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the results to this file, as JSON.", dir_okay=False)
]
Rounds = Annotated[int | None, typer.Option(min=1, help=f"Number of rounds; {DEFAULT_ROUNDS} by default.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes, to test that it runs; the results have no meaning.")
]

bench_command = typer.Typer(
    help="Measure memory, disk and tiers, and compare each with its physical limit.",
    no_args_is_help=True,
    add_completion=False,
)


@bench_command.command("memory")
def memory_command(
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt; 8192 by default, which is 1 GiB.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model; 32 by default.")] = None,
    json_file: JsonFile = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Measure stores and retrieves in host memory, and compare them with memcpy of the same bytes."""
    from lmcache_async.bench import memory  # imports torch, which --help does not need

    settings = _settings(memory.QUICK if quick else memory.Settings(), tokens=tokens, layers=layers)
    _run(memory, memory.run, settings, json_file, rounds, quick)


@bench_command.command("disk")
def disk_command(
    path: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write in; by default the one for temporary files.",
            file_okay=False,
            exists=True,
            writable=True,
        ),
    ] = None,
    mib: Annotated[
        int | None, typer.Option(min=1, help="MiB of each store and retrieve; 512 by default.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of concurrent records; 4 by default.")
    ] = None,
    json_file: JsonFile = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Measure stores and retrieves on disk, and compare them with pwrite and preadv with O_DIRECT."""
    from lmcache_async.bench import disk  # imports torch, which --help does not need

    base = disk.QUICK if quick else disk.Settings()
    settings = _settings(base, path=None if path is None else str(path), mib=mib, threads=threads)
    _run(disk, disk.run, settings, json_file, rounds, quick)


@bench_command.command("tier")
def tier_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TIER",
            help="The id of a tier in --config; without it a URL such as valkey://host:6379, a tier as JSON, or a name.",
            autocompletion=complete_tiers,
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="Config file of the engine.", exists=True, dir_okay=False)
    ] = None,
    mib: Annotated[int | None, typer.Option(min=1, help="MiB of each put and get; 256 by default.")] = None,
    connections: Annotated[
        int | None,
        typer.Option(min=1, help="Number of concurrent sockets or files of the raw limit; 4 by default."),
    ] = None,
    json_file: JsonFile = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Measure puts and gets of one tier, and compare them with memcpy and, if possible, raw I/O.

    Records have random keys and are removed again. A full tier may evict other records for them.
    """
    from lmcache_async.bench import tier  # imports torch, which --help does not need

    made = tier.quick(name, config) if quick else tier.Settings(name, config)
    settings = _settings(made, mib=mib, connections=connections)
    try:
        spec, third_party = find_tier(name, config)
    except LMCacheAsyncError as error:
        refuse(error)
    measure = partial(tier.run, spec, third_party=third_party)
    _run(tier, measure, settings, json_file, rounds, quick)


def find_tier(name: str, config: Path | None) -> tuple[TierSpec, bool]:
    """Return the tier of an argument, and whether third-party plug-ins may be loaded."""
    if config is not None:
        loaded = load_config(config)
        return named_tier(name, config, loaded, "TIER"), loaded.plugins.third_party
    if not name.lstrip().startswith("{"):
        scheme, is_url, _ = name.partition("://")
        name = json.dumps({"name": scheme, "url": name} if is_url else {"name": name})
    return named_tier(name, None, None, "TIER"), True


def _settings(base: Any, **given: Any) -> Any:
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})


def _run(
    benchmark: ModuleType,
    measure: Measure,
    settings: Any,
    json_file: Path | None,
    rounds: int | None,
    quick: bool,
) -> None:
    name = benchmark.__name__.rpartition(".")[2]
    try:
        with progress(TimeElapsedColumn()) as bar:
            task = bar.add_task(name, total=None)
            frame = Frame(
                rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
                quick=quick,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
            result = run(name, benchmark.SUMMARY, measure, settings, frame)
    except (LMCacheAsyncError, OSError) as error:
        refuse(error)
    for line in result.lines():
        say(line)
    if json_file is not None:
        figures = document([result], rounds=frame.rounds, quick=quick)
        try:
            json_file.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            refuse(error)
