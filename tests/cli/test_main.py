"""The entry point without its dependencies."""

import builtins
import sys

import pytest

from lmcache_async.cli import main as command


def test_without_typer_the_command_names_the_extra(monkeypatch, capsys):
    import_ = builtins.__import__

    def without_typer(name, *arguments, **options):
        if name.partition(".")[0] == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return import_(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "lmcache_async.cli.app", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_typer)

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "pip install 'lmcache-async[cli]'" in capsys.readouterr().err


def test_another_missing_package_is_not_blamed_on_the_extra(monkeypatch):
    import_ = builtins.__import__

    def without_torch(name, *arguments, **options):
        if name == "lmcache_async.cli.app":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return import_(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)

    with pytest.raises(ModuleNotFoundError, match="torch"):
        command.main()
