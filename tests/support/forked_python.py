"""Python programs in processes of their own that do not import torch again.

Each is a fork of one process that has imported the libraries below, but no module of this project. A program that
needs two seconds of CPU to import torch starts in some milliseconds.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import multiprocessing
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

LIBRARIES = (
    "torch",
    "numpy",
    "pydantic",
    "aiofiles",
    "msgpack",
    "uvloop",
    "xxhash",
    "yaml",
    "pytest",
    "hypothesis",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended.

    Attributes:
        status: Its exit status.
        output: What it wrote to stdout and stderr.
    """

    status: int | None
    output: str


def context() -> ForkServerContext:
    """Return the multiprocessing context whose processes are forks of the one that has imported the libraries."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(LIBRARIES))
    return found


def run(program: str, *, cwd: Path, path: Sequence[Path] = (), timeout_s: float = 250.0) -> Ended:
    """Run a program and wait for its end. It may await at its top level, as in a notebook.

    Args:
        program: Its file, absolute or relative to `cwd`.
        cwd: Its working directory, from which it can import modules.
        path: Further directories from which it can import modules.
        timeout_s: Time after which it is killed.
    """
    output = cwd / f"{program}.output"
    process = context().Process(target=_main, args=(program, cwd, output, [str(folder) for folder in path]))
    output.touch()
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    status = process.exitcode
    process.close()
    return Ended(status, output.read_text(encoding="utf-8"))


def _main(program: str, cwd: Path, output: Path, path: Sequence[str]) -> None:
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    sys.path[:0] = ["", *path]
    sys.argv = [program]
    code = compile(Path(program).read_text(encoding="utf-8"), program, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    result = types.FunctionType(code, vars(module))()
    if inspect.iscoroutine(result):
        asyncio.run(result)
