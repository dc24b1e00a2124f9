"""A program that forks commands and kills them at a system call.

Each line of its input, `<call> <JSON arguments>`, forks a process that has imported everything. The child kills
itself at its `call`-th system call on a file (before an even one, after an odd one, never for 0). Then the program
prints `dead <status>`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

CALLS = ("open", "write", "pwrite", "utime", "fsync", "ftruncate", "replace", "unlink", "mkdir")


def die_at(call: int) -> None:
    numbers = itertools.count(1)

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def wrapped(*args: object, **options: object) -> object:
            if not threading.current_thread().name.startswith("lmcache-"):
                return real(*args, **options)
            number = next(numbers)
            if number == call and call % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **options)
            finally:
                if number == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, wrapped)

    for name in CALLS:
        wrap(name)


def run(call: int, arguments: list[str]) -> None:
    from lmcache_async.cli.app import app

    status = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if call:
            die_at(call)
        app(arguments, standalone_mode=False)
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    import lmcache_async.plugins.disk  # noqa: F401 - imported once, before the forks
    from lmcache_async.cli.app import load_commands

    load_commands()

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        call, arguments = line.split(maxsplit=1)
        child = os.fork()
        if child == 0:
            run(int(call), json.loads(arguments))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"dead {status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    assert Path(__file__).is_file()
    main()
