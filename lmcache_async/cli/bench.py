"""`lmcache-async bench`: measure memory, disk and one tier, and compare each with its physical limit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer import Argument, Option

from lmcache_async.bench.measure import DEFAULT_ROUNDS, QUICK_ROUNDS, Frame, Measure, document, run
from lmcache_async.cli.output import ended_like_ctrl_c, progress, say
from lmcache_async.cli.records import Config
from lmcache_async.cli.tiers import complete_tiers
from lmcache_async.maintenance.stores import Stores

JsonFile = Annotated[
    Path | None, Option("--json", help="Write the results to this file, as JSON.", dir_okay=False)
]
Rounds = Annotated[int | None, Option(min=1, help=f"Number of rounds; {DEFAULT_ROUNDS} by default.")]
Quick = Annotated[
    bool,
    Option("--quick", help="Use small sizes, to test that the benchmark runs; the results have no meaning."),
]

bench_command = typer.Typer(no_args_is_help=True, add_completion=False)


@bench_command.command("memory")
def memory_command(
    tokens: Annotated[
        int | None, Option(min=1, help="Tokens of the prompt; 8192 by default, which is 1 GiB.")
    ] = None,
    layers: Annotated[int | None, Option(min=1, help="Layers of the model; 32 by default.")] = None,
    json_file: JsonFile = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Measure stores and retrieves in host memory, and compare them with memcpy of the same bytes."""
    from lmcache_async.bench import memory  # imports torch, which --help does not need

    _run(memory, memory.run, json_file, rounds, quick, tokens=tokens, layers=layers)


@bench_command.command("disk")
def disk_command(
    path: Annotated[
        Path | None,
        Option(
            help="Directory to write to; by default the directory for temporary files.",
            file_okay=False,
            exists=True,
            writable=True,
        ),
    ] = None,
    mib: Annotated[int | None, Option(min=1, help="MiB of each store and retrieve; 512 by default.")] = None,
    threads: Annotated[
        int | None,
        Option(min=1, max=64, help="Number of concurrent records; 4 by default."),  # as `io_threads`
    ] = None,
    json_file: JsonFile = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Measure stores and retrieves on disk, and compare them with pwrite and preadv with O_DIRECT."""
    from lmcache_async.bench import disk  # imports torch, which --help does not need

    _run(disk, disk.run, json_file, rounds, quick, path=path and str(path), mib=mib, threads=threads)


@bench_command.command("tier")
def tier_command(
    name: Annotated[
        str,
        Argument(
            metavar="TIER",
            help="A tier as JSON; with --config the id of a tier, else a URL such as valkey://host:6379 or a tier's name.",
            autocompletion=complete_tiers,
        ),
    ],
    config: Config = None,
    mib: Annotated[int | None, Option(min=1, help="MiB of each put and get; 256 by default.")] = None,
    connections: Annotated[
        int | None,
        Option(min=1, help="Number of concurrent sockets or files of the raw limit; 4 by default."),
    ] = None,
    json_file: JsonFile = None,
    rounds: Rounds = None,
    quick: Quick = False,
) -> None:
    """Measure puts and gets of one tier, and compare them with memcpy and, if possible, raw I/O.

    Records have random keys and are removed at the end, if the tier can remove records. A full tier may evict
    other records for them.
    """
    from lmcache_async.bench import tier  # imports torch, which --help does not need

    text, stores = name, Stores(config)
    if config is None and not name.lstrip().startswith("{"):
        scheme, is_url, _ = name.partition("://")
        text = json.dumps({"name": scheme, "url": name} if is_url else {"name": name})
    measure = partial(tier.run, stores.spec(text, "TIER"), third_party=stores.third_party)
    _run(tier, measure, json_file, rounds, quick, tier=name, config=config, mib=mib, connections=connections)


def _run(
    benchmark: ModuleType,
    measure: Measure,
    json_file: Path | None,
    rounds: int | None,
    quick: bool,
    **given: Any,
) -> None:
    """Run a benchmark with the given settings; None stands for the default."""
    chosen = {key: value for key, value in given.items() if value is not None}
    settings = benchmark.Settings(**((benchmark.QUICK if quick else {}) | chosen))
    name = benchmark.__name__.rpartition(".")[2]
    if json_file is not None:  # a file that cannot be written is reported before the measurement
        json_file.open("a").close()
    with ended_like_ctrl_c(), progress() as show:
        frame = Frame(
            rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
            quick=quick,
            progress=lambda done, total: show(name, done, total, 0),
        )
        result = run(name, benchmark.SUMMARY, measure, settings, frame)
    for line in result.lines():
        say(line)
    if json_file is not None:
        figures = document([result], rounds=frame.rounds, quick=quick)
        json_file.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
