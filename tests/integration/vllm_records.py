"""Find and damage records on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lmcache_async.memory.header import read_header


def record_of(disk: Path, prompt: tuple[int, ...], start: int) -> Path:
    """Return the file of the prompt's chunk that starts at a position."""
    for path in disk.glob("??/*"):
        header = read_header(memoryview(path.read_bytes()))
        if tuple(header.tokens.tolist()) == prompt[start : start + len(header.tokens)]:
            return path
    raise FileNotFoundError(f"no record of the tokens from {start} on")


def change_one_byte(path: Path) -> None:
    """Make one element of the first layer's keys 256 times as large."""
    content = bytearray(path.read_bytes())
    start = read_header(memoryview(content)).header_bytes
    numbers = np.frombuffer(content, np.float32, count=2048, offset=start)  # keys of one block and one head
    place = int(np.flatnonzero((abs(numbers) >= 2) & (abs(numbers) < 8))[0])
    content[start + 4 * place + 3] ^= 0x04  # in the exponent
    path.write_bytes(content)


def namespace_of(record: Path) -> str:
    """Return the text of a record's namespace."""
    return read_header(memoryview(record.read_bytes())).namespace


def starts_in(prompt: tuple[int, ...], records: Iterable[Path]) -> dict[Path, int]:
    """Return the prompt position of the first token of each record of the prompt."""
    starts = {}
    for record in records:
        own = tuple(read_header(memoryview(record.read_bytes())).tokens.tolist())
        for start in range(len(prompt)):
            if prompt[start : start + len(own)] == own:
                starts[record] = start
    return starts


def change_first_payload_byte(record: Path) -> None:
    """Flip one bit of the payload."""
    content = bytearray(record.read_bytes())
    content[read_header(memoryview(content)).header_bytes] ^= 0x40
    record.write_bytes(content)
