"""`lmcache-async tiers`: what is installed, from where, with which options, and what each can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from lmcache_async.cli.catalog import KINDS, Entry, catalog
from lmcache_async.cli.output import JSONFlag, print_json, refuse
from lmcache_async.config.validation import hint, nearest
from lmcache_async.registry import Registry


def complete_tiers(incomplete: str) -> list[str]:
    """The names of installed plug-ins that begin so; nothing is imported."""
    registry = Registry()
    names = {name for group in KINDS.values() for name in registry.available(group)}
    return sorted(name for name in names if name.startswith(incomplete))


def tiers_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One tier, layer or stage, with all that is known of it.",
            autocompletion=complete_tiers,
        ),
    ] = None,
    as_json: JSONFlag = False,
) -> None:
    """List the tiers, layers and stages that are installed, and what is wrong with those that cannot be used."""
    entries = catalog(Registry())
    if name is not None:
        names = {entry.name for entry in entries}
        entries = [entry for entry in entries if entry.name == name]
        if not entries:
            refuse(
                f"there is no tier, layer or stage {name}{hint(nearest(name, names))}"
                " (lmcache-async tiers lists all)"
            )
    if as_json:
        print_json([entry.as_dict() for entry in entries])
        return
    for line in _list(entries) if name is None else _details(entries):
        typer.echo(line)


def _list(entries: list[Entry]) -> Iterator[str]:
    width = max(len(entry.name) for entry in entries)
    for kind in KINDS:
        yield f"{kind}s"
        for entry in entries:
            if entry.kind == kind:
                origin = f"{entry.distribution} {entry.version}"
                yield f"  {entry.name:<{width}}  {origin}  {entry.summary if not entry.problem else ''}".rstrip()
                if entry.problem:
                    yield f"  {'':<{width}}  cannot be used: {entry.problem}"


def _details(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        yield f"{entry.kind} {entry.name}, of {entry.distribution} {entry.version} ({entry.value})"
        if entry.problem:
            yield f"  cannot be used: {entry.problem}"
        if entry.summary:
            yield f"  {entry.summary}"
        yield from _facts(entry)
        if entry.options:
            yield "  options:"
        for option in entry.options:
            default = "needed" if option.default is None else f"default {option.default or repr('')}"
            yield f"    {option.name}: {option.kind}; {default}"
            if option.help:
                yield f"      {option.help}"


def _facts(entry: Entry) -> Iterator[str]:
    for name, value in entry.details.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {shown}" for key, shown in value.items())
        elif isinstance(value, list):
            value = ", ".join(value) or "nothing"
        elif value is None:
            value = "by its options"
        yield f"  {name}: {value}"
