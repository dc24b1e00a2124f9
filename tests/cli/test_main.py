"""The entry point without its dependencies."""

import builtins
import sys

import pytest

from lmcache_async.cli import main as command


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
