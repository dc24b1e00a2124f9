"""The package of vLLM for a GPU machine without network."""

from __future__ import annotations

import struct

from tools.gpu.offline import keep_architecture

PTX, MACHINE_CODE = 1, 2


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 1, len(header), len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_only_device_code_of_the_architecture_is_kept() -> None:
    def module(older: bytes, portable: bytes) -> bytes:
        both = fat_binary(
            entry(MACHINE_CODE, 80, older), entry(MACHINE_CODE, 90, b"new"), entry(PTX, 90, portable)
        )
        return b"host code" + both + b"more host code" + fat_binary(entry(MACHINE_CODE, 90, b"other"))

    reduced = bytearray(module(b"old", b"ptx"))
    keep_architecture(reduced, 90)

    assert reduced == module(bytes(3), bytes(3))


def test_portable_code_is_kept_if_there_is_no_other() -> None:
    portable = entry(PTX, 75, b"portable")
    reduced = bytearray(fat_binary(entry(MACHINE_CODE, 80, b"old"), portable))
    keep_architecture(reduced, 90)

    assert reduced == fat_binary(entry(MACHINE_CODE, 80, bytes(3)), portable)
