"""Find or unpack headless Chromium."""

from __future__ import annotations

import subprocess

import pytest

from tools import native
from tools.browser import PROGRAMS, find, main


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_done_if_the_system_has_one(tmp_path, program, name):
    path = program(name, "true")

    assert main([str(tmp_path / "browser")]) == 0
    assert not (tmp_path / "browser").exists()
    assert find(tmp_path / "browser") == path


def test_with_apt_the_packages_are_unpacked_with_a_start_script(tmp_path, program, capsys):
    program("apt-config", """echo 'X::Post-Invoke:: "rm -rf /";'""")
    program(
        "apt-get",
        """
        ! grep -q Invoke "$APT_CONFIG" && grep -q 'Dir::State::status "/var' "$APT_CONFIG"
        case "$2" in
            update) touch updated; exit 100 ;;  # one of many sources does not answer
            -y) test -e updated; case "$*" in *--download-only*chromium-headless-shell*) ;; *) exit 9 ;; esac
                touch cache/archives/one.deb cache/archives/two.deb ;;
            *) exit 8 ;;
        esac""",
    )
    program(
        "dpkg",
        """
        mkdir -p "$3/usr/lib/x86_64-linux-gnu" "$3/usr/lib/chromium"
        program="$3/usr/lib/chromium/chromium-headless-shell"
        printf '#!/bin/sh\\necho "$LD_LIBRARY_PATH" "$FONTCONFIG_FILE" "$@"\\n' > "$program"
        chmod +x "$program" """,
    )
    target = tmp_path / "browser"

    assert main([str(target)]) == 0
    assert find(target) == target / "chromium"
    said = subprocess.run(
        [target / "chromium", "--one", "two three"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith(f"{target}/usr/lib/x86_64-linux-gnu:")
    assert said.stdout.endswith(f"{target}/fonts.conf --one two three\n")
    assert "chromium-headless-shell is in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "missing"),
    [(main, "apt install chromium"), (native.main, "apt install libibverbs1")],
    ids=["browser", "native"],
)
def test_without_apt_the_error_says_what_to_install(tmp_path, program, monkeypatch, capsys, run, missing):
    monkeypatch.setattr(native, "LIBRARIES", (native.Library(("libours.so.1",), ("ours",)),))

    assert run([str(tmp_path / "target")]) == 1
    printed = capsys.readouterr().err
    assert missing in printed
    assert "dnf install" in printed
    assert not (tmp_path / "target" / "chromium").exists()

    monkeypatch.setattr(native, "LIBRARIES", (native.Library(("libc.so.6",), ("libc6",)),))
    assert native.main([str(tmp_path / "native")]) == 0  # nothing to do
    assert not (tmp_path / "native").exists()


def test_an_error_of_apt_is_printed(tmp_path, program, capsys):
    program("apt-config", "true")
    program("apt-get", "echo E: unable to locate; exit 100")

    assert main([str(tmp_path / "browser")]) == 1
    assert "E: unable to locate" in capsys.readouterr().err
