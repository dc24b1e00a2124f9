"""The entry point without its dependencies, and the end of a command with an error."""

import builtins
import errno
import io
import sys

import pytest
import typer
from typer.testing import CliRunner

from lmcache_async.cli import main as command
from lmcache_async.cli.app import LazyGroup


@pytest.fixture
def without(monkeypatch):
    """Return a function that lets the import of a module fail because of a missing package."""
    import_ = builtins.__import__

    def fail(module, package):
        def imported(name, *arguments, **options):
            if name == module:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return import_(name, *arguments, **options)

        monkeypatch.delitem(sys.modules, "lmcache_async.cli.app", raising=False)
        monkeypatch.setattr(builtins, "__import__", imported)

    return fail


def test_without_typer_the_command_names_the_extra(without, capsys):
    without("typer", "typer")

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "pip install 'lmcache-async[cli]'" in capsys.readouterr().err


def test_another_missing_package_is_not_blamed_on_the_extra(without):
    without("lmcache_async.cli.app", "torch")

    with pytest.raises(ModuleNotFoundError, match="torch"):
        command.main()


def test_ctrl_c_during_the_imports_ends_without_a_traceback(monkeypatch):
    def interrupted(name, *arguments, **options):
        if name == "lmcache_async.cli.app":
            raise KeyboardInterrupt
        return import_(name, *arguments, **options)

    import_ = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130


class Full(io.StringIO):
    """A stream to a full disk."""

    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_output_to_a_full_disk_ends_with_one_line(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["lmcache-async", option])
    monkeypatch.setattr(sys, "stdout", Full())

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["unknown"], 2), (["config", "show", "missing.yaml"], 1), (["top", "ftp://x"], 2)],
)
def test_messages_to_a_full_disk_do_not_change_the_exit_code(monkeypatch, arguments, code):
    monkeypatch.setattr(sys, "argv", ["lmcache-async", *arguments])
    monkeypatch.setattr(sys, "stderr", Full())

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == code


def test_a_home_that_cannot_be_written_is_named(monkeypatch, capsys, tmp_path):
    home = tmp_path / "file"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    monkeypatch.setattr(sys, "argv", ["lmcache-async", "--install-completion"])

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert f": '{home}" in capsys.readouterr().err


def test_output_that_the_locale_cannot_encode_is_replaced(monkeypatch, tmp_path):
    config = tmp_path / "ж.yaml"
    config.write_text("chunk_size: 0")
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["lmcache-async", "config", "check", str(config)])

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    output.seek(0)
    assert "?.yaml, line 1: chunk_size is 0" in output.read()


def test_a_closed_connection_is_not_mistaken_for_closed_output():
    group = typer.Typer(cls=LazyGroup, callback=lambda: None)

    @group.command()
    def send():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe", "/run/a.sock")

    ended = CliRunner().invoke(group, ["send"])

    assert (ended.exit_code, ended.stderr) == (2, "[Errno 32] Broken pipe: '/run/a.sock'\n")
