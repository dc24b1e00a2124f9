"""`tools.install` gives uv the configuration of pip, and uses pip if uv fails."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools import install

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
OLDEST_PYTHON = "3.11.0"

CONFIG = """\
:env:.find-links='/wheels /more'
:env:.default-timeout='180'
download.index-url='https://other.example/simple'
global.cert='/etc/certificates.crt'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/old'
global.index-url='https://all.example/simple'
install.index-url='https://mirror.example/simple'
"""


def test_uv_gets_the_indexes_of_pip_by_the_precedence_of_pip() -> None:
    found = install.uv_environment(CONFIG, {"PATH": "/bin", "SSL_CERT_FILE": "/mine"})

    assert found == {
        "PATH": "/bin",
        "SSL_CERT_FILE": "/mine",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_PROGRESS": "1",
    }


@pytest.mark.parametrize(
    ("has_uv", "uv_status", "used"), [(True, 0, ["uv"]), (True, 2, ["uv", "pip"]), (False, 0, ["pip"])]
)
def test_pip_installs_what_uv_cannot(
    monkeypatch: pytest.MonkeyPatch, has_uv: bool, uv_status: int, used: list[str]
) -> None:
    called: list[list[str]] = []

    def call(command: list[str], **options: Any) -> int:
        called.append(command)
        return uv_status if command[2] == "uv" else 0

    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: name if has_uv else None)
    monkeypatch.setattr(subprocess, "call", call)

    assert install.main(["--no-deps", "-r", "some.txt"]) == 0
    assert [command[2] for command in called] == used
    assert all(
        command[0] == sys.executable and command[-3:] == ["--no-deps", "-r", "some.txt"] for command in called
    )


def requires_python(requirement: Requirement) -> SpecifierSet:
    """Return the Python versions for the installed version of a requirement."""
    metadata = importlib.metadata.metadata(requirement.name)
    return SpecifierSet(metadata.get("Requires-Python") or "")


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate()


@pytest.mark.parametrize("name", ["package.txt", "test.txt"])
def test_the_oldest_python_can_install_the_pinned_versions(name: str) -> None:
    lines = [line for line in (REQUIREMENTS / name).read_text().splitlines() if line and line[0] != "#"]
    pinned = list(filter(applies, map(Requirement, lines)))

    assert pinned
    assert [str(each) for each in pinned if OLDEST_PYTHON not in requires_python(each)] == []
