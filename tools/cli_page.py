"""`python -m tools.cli_page`: write the commands and their options into docs/cli.md, below its mark."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_async.cli.app import load_commands

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
MARK = "<!-- What follows is written by: python -m tools.cli_page -->\n"


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def page(text: str) -> str:
    """The page with today's commands below its mark."""
    above, mark, _ = text.partition(MARK)
    if not mark:
        sys.exit(f"{PAGE} has no line {MARK!r}")
    return (
        above
        + MARK
        + "".join(
            part for name, command in sorted(load_commands().items()) for part in _section(command, name)
        )
    )


def _section(command: Any, name: str) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    shown = "".join(f" {_name(one)}" if one.required else f" [{_name(one)}]" for one in arguments)
    yield f"\n## {name}\n\n```text\nlmcache-async {name}{shown} [options]\n```\n\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    if arguments or options:
        yield "\n| argument or option | default | |\n|---|---|---|\n"
    for one in arguments:
        yield f"| `{_name(one)}` | | {_cell(one.help)} |\n"
    for one in options:
        names = "`, `".join((*one.opts, *one.secondary_opts))
        yield f"| `{names}` | {_default(one)} | {_cell(one.help)} |\n"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _default(option: Any) -> str:
    value = option.default
    if option.is_flag or value is None or callable(value) or type(value).__name__ == "Sentinel":
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
