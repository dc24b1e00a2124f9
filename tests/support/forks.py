"""Functions of a module in child processes, forked from one that has imported everything and has no threads.

The module, which ends with `serve(globals())`, is run as a program. Each line of its input, `<function> <JSON
arguments>`, forks a child that runs that function. The output of the child is passed on; when it is dead, `dead
<status>` is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class Children:
    """Starts functions of a module in child processes."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._line() == "ready"

    def start(self, function: str, **arguments: object) -> Iterator[str]:
        """Yield the output line by line; the last line is `dead <status>`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{function} {json.dumps(arguments)}\n")
        while True:
            line = self._line()
            yield line
            if line.startswith("dead "):
                return

    def run(self, function: str, **arguments: object) -> list[str]:
        """Return the whole output; the child must have exited normally."""
        *lines, last = self.start(function, **arguments)
        assert last == "dead 0", "\n".join(lines)
        return lines

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program ended"
        return line.rstrip("\n")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def serve(functions: Mapping[str, Callable[..., object]]) -> None:
    """Fork a child for each line of the input."""
    say("ready")
    for line in sys.stdin:
        function, arguments = line.split(" ", 1)
        child = os.fork()
        if child == 0:
            _run(functions[function], json.loads(arguments))
        _, status = os.waitpid(child, 0)
        say(f"dead {status}")


def _run(function: Callable[..., object], arguments: dict[str, object]) -> None:
    status = 1
    try:
        function(**arguments)
        status = 0
    except BaseException:  # noqa: BLE001 - the parent is to see it
        say(traceback.format_exc())
    finally:
        os._exit(status)
