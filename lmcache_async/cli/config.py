"""`lmcache-async config`: what holds and why, what is wrong, and what there is to set."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_async.cli.effective import Value, daemon_values, engine_values
from lmcache_async.cli.output import PROBLEM, JSONFlag, print_json, refuse
from lmcache_async.cli.schema import daemon_schema, engine_schema
from lmcache_async.config import read_config, survey_config
from lmcache_async.config.validation import placed_lines
from lmcache_async.daemon.config import survey_daemon_config
from lmcache_async.engine.check import all_problems
from lmcache_async.errors import LMCacheAsyncError
from lmcache_async.registry import Registry
from lmcache_async.web.opening import check_endpoint

config_app = typer.Typer(no_args_is_help=True, add_completion=False, help="Show, check and describe configs.")

DaemonFlag = Annotated[
    bool, typer.Option("--daemon", help="The file is that of lmcache-async serve, not an engine's.")
]
ExtraOption = Annotated[
    str | None,
    typer.Option("--extra", metavar="JSON", help="vLLM's kv_connector_extra_config, which comes first."),
]


@config_app.command("show")
def show_command(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A YAML file; by default the one that the environment names.", dir_okay=False
        ),
    ] = None,
    extra: ExtraOption = None,
    daemon: DaemonFlag = False,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out defaults.")] = False,
    as_json: JSONFlag = False,
) -> None:
    """Print every key with its value and where that came from. Secrets are not shown."""
    notes: tuple[str, ...] = ()
    try:
        if daemon:
            values = daemon_values(file, {} if file is not None else {"max_bytes": "1GiB"})
        else:
            loaded = read_config(file, extra=_extra(extra))
            values, notes = engine_values(loaded, Registry()), loaded.notes
    except LMCacheAsyncError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(PROBLEM) from None
    values = [value for value in values if not changed or value.source != "default"]
    if as_json:
        print_json({"values": [asdict(value) for value in values], "notes": notes})
        return
    _print(values)
    for note in notes:
        typer.echo(f"no effect: {note}", err=True)


@config_app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.", dir_okay=False)],
    extra: ExtraOption = None,
    daemon: DaemonFlag = False,
    as_json: JSONFlag = False,
) -> None:
    """Tell everything that is wrong with a config, a line for each; ends with 1 if anything is.

    Plug-ins are imported and files of secrets are read, as an engine would; nothing is connected to.
    """
    notes: tuple[str, ...] = ()
    found, notes = (check_daemon_file(file), ()) if daemon else check_file(file, _extra(extra))
    if as_json:
        print_json({"file": str(file), "problems": found, "notes": notes})
    else:
        for line in found:
            typer.echo(line)
        for note in notes:
            typer.echo(f"no effect: {note}", err=True)
        if not found:
            typer.echo(f"{file}: nothing is wrong")
    if found:
        raise typer.Exit(PROBLEM)


@config_app.command("schema")
def schema_command(daemon: DaemonFlag = False) -> None:
    """Print the JSON schema of a config file, with the options of all installed tiers, layers and stages.

    An editor that knows it completes keys and marks mistakes; docs/config.md says how to name it there.
    """
    print_json(daemon_schema() if daemon else engine_schema(Registry()))


def check_file(
    file: Path | None, extra: dict[str, Any] | None = None, registry: Registry | None = None
) -> tuple[list[str], tuple[str, ...]]:
    """What is wrong with an engine's config, and what has no effect; `registry` has the installed plug-ins."""
    loaded = survey_config(file, extra=extra)
    return all_problems(loaded, registry or Registry()), loaded.notes


def check_daemon_file(file: Path) -> list[str]:
    """What is wrong with a daemon's config, and with the files that it names."""
    config, found, origin = survey_daemon_config(file, {})
    if config is None:
        return found
    return [*found, *placed_lines(check_endpoint(config.http), origin.at)]


def _extra(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        extra = json.loads(text)
    except ValueError as error:
        refuse(f"--extra: not JSON: {error}")
    if not isinstance(extra, dict):
        refuse('--extra: expected a mapping, such as {"arena.max_bytes": "8GiB"}')
    return extra


def _print(values: list[Value]) -> None:
    keys = max((len(value.key) for value in values), default=0)
    texts = min(48, max((len(value.value) for value in values), default=0))
    for value in values:
        typer.echo(f"{value.key:<{keys}}  {value.value or repr(''):<{texts}}  {value.source}")
