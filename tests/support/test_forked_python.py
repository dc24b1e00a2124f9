"""Programs in processes of their own."""

from __future__ import annotations

from pathlib import Path

from tests.support import forked_python


def test_a_program_has_the_names_of_a_module_that_python_runs(tmp_path: Path) -> None:
    """From Python 3.12 on, a class with type arguments looks them up in `__builtins__`."""
    program = tmp_path / "program.py"
    program.write_text("print(__name__, __builtins__.__name__)")

    ended = forked_python.run(str(program), cwd=tmp_path)

    assert (ended.status, ended.output) == (0, "__main__ builtins\n"), ended.output
