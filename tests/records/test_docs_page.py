"""docs/records.md: its commands run, in their order, and end with 0; its tables name what there is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import xxhash

from lmcache_async.cli import records as shared
from lmcache_async.cli.app import load_commands
from lmcache_async.records.archive import FRAME_BYTES, ArchiveHead, End, Frame
from tests.records.filled import TOKENS, filled, invoke, rig_of
from tests.support.valkey_servers import running

PAGE = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
COMMANDS = ("inspect", "verify", "gc", "export", "import", "warm")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(tmp_path / "cache", rig=rig_of("model-a"))
    filled(tmp_path / "cache", TOKENS[:16], rig=rig_of("model-b"))
    Path("prompts.jsonl").write_text(json.dumps(TOKENS) + "\n")
    Path("requests.jsonl").write_text(json.dumps({"prompt_token_ids": TOKENS}) + "\n")
    with running() as server:
        places = {
            "/var/cache/lmcache-async": str(tmp_path / "cache"),
            "/var/cache/elsewhere": str(tmp_path / "elsewhere"),
            "valkey://localhost:6379": server.url,
        }

        def here(text):
            for place, real in places.items():
                text = text.replace(place, real)
            return text

        Path("engine.yaml").write_text(here(blocks("yaml")[0]))
        lines = [here(line) for block in blocks("bash") for line in block.splitlines()]
        ran = []
        for line in lines:
            program, *arguments = shlex.split(line)
            assert program == "lmcache-async"
            result = invoke(*arguments)
            assert result.exit_code == 0, f"{line}\n{result.output}"
            ran.append(arguments[0])

    assert set(ran) == set(COMMANDS)
    assert len(ran) >= 15


def test_every_option_is_one_that_the_commands_have():
    commands = load_commands()
    known = {
        option
        for name in COMMANDS
        for each in commands[name].params
        for option in each.opts + each.secondary_opts
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))

    assert named - known == {"--enable-prompt-tokens-details"}  # vLLM's


def test_the_exit_codes_are_those_of_the_page():
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}

    assert listed == {shared.RIGHT, shared.WRONG, shared.REFUSED, shared.IN_USE, shared.STOPPED}


def test_the_format_is_that_of_the_page():
    head = ArchiveHead(7, 8, b"s" * 16, b"a" * 16).pack()
    frame = Frame(b"k" * 16, 9, 10, b"c" * 8).pack()
    end = End(11, b"e" * 8, more=True).pack()

    assert len(head) == len(frame) == len(end) == FRAME_BYTES == 64
    assert head[:56] == b"LMCARCHV\x01\0\0\0\x07\0\0\0" + (8).to_bytes(8, "little") + b"s" * 16 + b"a" * 16
    assert (
        frame[:56]
        == b"LMCFRAME\x01"
        + bytes(7)
        + b"k" * 16
        + (9).to_bytes(8, "little")
        + (10).to_bytes(8, "little")
        + b"c" * 8
    )
    assert (
        end[:56] == b"LMCFRAME\x03" + bytes(7) + bytes(16) + (11).to_bytes(8, "little") + bytes(8) + b"e" * 8
    )


def test_checksums_have_the_byte_order_of_the_page(tmp_path):
    """Read as the page says, with whole numbers only: no digest of a library says which order it has."""
    filled(tmp_path / "cache")
    assert invoke("export", tmp_path / "cache", tmp_path / "a.lmcar").exit_code == 0
    data = (tmp_path / "a.lmcar").read_bytes()
    at, frames = 64, b""

    def follows(checksum: bytes, what: bytes) -> bool:
        return int.from_bytes(checksum, "big") == xxhash.xxh3_64_intdigest(what)

    assert "canonical form, which is big-endian" in PAGE
    assert follows(data[56:64], data[:56])
    while data[at + 8] == 1:
        frame, nbytes = data[at : at + 64], int.from_bytes(data[at + 40 : at + 48], "little")
        assert follows(frame[48:56], data[at + 64 : at + 64 + nbytes])
        assert follows(frame[56:], frame[:56])
        frames += frame
        at += 64 + nbytes
    end = data[at:]
    assert len(end) == 64
    assert len(frames) == 64 * int.from_bytes(end[32:40], "little") == 64 * 5
    assert follows(end[48:56], frames)
