"""System libraries for tests: nothing is downloaded if they are installed, and only missing ones otherwise."""

from __future__ import annotations

from tools import native
from tools.native import Library, main

MISSING = Library(("libfirst-of-ours.so.1", "libours.so.1"), ("first", "ours"))


def test_with_apt_its_packages_are_unpacked_under_their_sonames(tmp_path, program, monkeypatch, capsys):
    monkeypatch.setattr(native, "LIBRARIES", (MISSING,))
    program("apt-config", """echo 'Acquire::Retries "1";'; echo 'X::Post-Invoke:: "rm -rf /";'""")
    program(
        "apt-get",
        """
        ! grep -q Invoke "$APT_CONFIG" && grep -q 'Dir::State "/' "$APT_CONFIG" && grep -q Retries "$APT_CONFIG"
        case "$2" in
            update) touch updated; exit 100 ;;  # one of many sources does not answer
            download) test -e updated; shift 2; for name; do echo "$name" > "$name.deb"; done ;;
        esac""",
    )
    program(
        "dpkg",
        """
        name=$(cat "$2"); mkdir -p "$3/usr/lib"
        [ "$name" = first ] && soname=libfirst-of-ours.so.1 || soname=libours.so.1
        echo "$name" > "$3/usr/lib/$soname.2.3"; ln -s "$soname.2.3" "$3/usr/lib/$soname" """,
    )
    target = tmp_path / "native"

    assert main([str(target)]) == 0
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "libfirst-of-ours.so.1": "first\n",
        "libours.so.1": "ours\n",
    }
    assert "for tests only: first, ours" in capsys.readouterr().out


def test_every_file_that_is_needed_comes_with_a_package():
    assert [library.soname for library in native.LIBRARIES] == ["libnuma.so.1", "libibverbs.so.1"]
    assert all(len(library.files) == len(library.packages) for library in native.LIBRARIES)
