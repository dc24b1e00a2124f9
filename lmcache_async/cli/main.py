"""Entry point of `lmcache-async`. The packages of the command are an extra; the error for a missing one names it."""

from __future__ import annotations

import contextlib
import io
import os
import sys

PACKAGES = ("typer", "rich", "click", "shellingham", "httpx", "psutil")


def main() -> None:
    """Run the command of `sys.argv`."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the locale lacks, such as those of charts
        sys.stdout.reconfigure(errors="replace")
    try:
        from lmcache_async.cli.app import app

        app(prog_name="lmcache-async")  # imports the module of the command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in PACKAGES:
            raise
        sys.stderr.write(
            f"lmcache-async needs the package {missing}, which is not installed: "
            "pip install 'lmcache-async[cli]'\n"
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # during the imports
        raise SystemExit(130) from None
    except OSError as error:  # of --help, --version or --install-completion
        text = error if error.filename else f"the output cannot be written: {error.strerror}"
        with contextlib.suppress(OSError):  # the error may be that of stderr
            sys.stderr.write(f"{text}\n")
        raise SystemExit(2) from None
    finally:
        _discard_unwritten_output()


def _discard_unwritten_output() -> None:
    """Discard output that cannot be written. Python would try again at its end, and change the exit code to 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise a file or socket opened later gets the descriptor: uvloop aborts, and libraries print to that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")  # None if it was closed
    sys.stderr = sys.stderr or os.fdopen(2, "w")
