"""Entry point of the command `lmcache-async`. Its packages are an extra; a missing one is named."""

from __future__ import annotations

import sys

EXTRA = "cli"
PACKAGES = ("typer", "rich", "click", "shellingham", "httpx", "psutil")


def main() -> None:
    """Run the command of `sys.argv`."""
    try:
        from lmcache_async.cli.app import app

        app(prog_name="lmcache-async")  # imports the module of the command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in PACKAGES:
            raise
        sys.stderr.write(
            f"lmcache-async needs the package {missing}, which is not installed: "
            f"pip install 'lmcache-async[{EXTRA}]'\n"
        )
        raise SystemExit(2) from None
