"""A command in a child process that is killed at a system call; see tests.support.forks."""

from __future__ import annotations

import itertools
import os
import signal
import threading

from lmcache_async.cli.app import app, load_commands
from lmcache_async.plugins.disk import files as disk_files
from tests.support.forks import serve

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
    """Run a command. It kills itself at its `call`-th system call on a file: before an even one, after an odd one."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    disk_files.publish_file = None  # records are written by single calls from Python
    die_at(call)
    app(arguments, standalone_mode=False)


if __name__ == "__main__":
    load_commands()
    serve(globals())
