"""Damages of a record file, one function each."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from lmcache_async.memory.buffer import PAGE

Damage = Callable[[Path, list[Path], random.Random], None]
"""Called with the record, the other records and a random generator."""


def flip_one_bit(path: Path, others: list[Path], generator: random.Random) -> None:
    _flip(path, generator, 1, lambda byte: byte ^ 1 << generator.randrange(8))


def flip_bytes(path: Path, others: list[Path], generator: random.Random) -> None:
    _flip(path, generator, generator.randint(1, 16), lambda byte: byte ^ generator.randint(1, 255))


def flip_in_header(path: Path, others: list[Path], generator: random.Random) -> None:
    _flip(path, generator, 1, lambda byte: byte ^ generator.randint(1, 255), stop=256)


def zero_a_page(path: Path, others: list[Path], generator: random.Random) -> None:
    """As after a power loss between writing metadata and data."""
    with path.open("r+b") as file:
        file.seek(generator.randrange(path.stat().st_size // PAGE) * PAGE)
        file.write(bytes(PAGE))


def swap_pages(path: Path, others: list[Path], generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    one, other = (generator.randrange(len(content) // PAGE) * PAGE for _ in range(2))
    content[one : one + PAGE], content[other : other + PAGE] = (
        content[other : other + PAGE],
        content[one : one + PAGE],
    )
    path.write_bytes(content)


def truncate(path: Path, others: list[Path], generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size))


def truncate_to_pages(path: Path, others: list[Path], generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size // PAGE) * PAGE)


def extend(path: Path, others: list[Path], generator: random.Random) -> None:
    with path.open("ab") as file:
        file.write(generator.randbytes(generator.choice((1, 100, PAGE, 2 * PAGE))))


def swap_records(path: Path, others: list[Path], generator: random.Random) -> None:
    """Exchange two intact records."""
    other = generator.choice(others)
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def replace_payload(path: Path, others: list[Path], generator: random.Random) -> None:
    """Combine this header with the payload of another record."""
    content, other = path.read_bytes(), generator.choice(others).read_bytes()
    path.write_bytes(content[:PAGE] + other[PAGE:])


def replace_by_noise(path: Path, others: list[Path], generator: random.Random) -> None:
    path.write_bytes(generator.randbytes(path.stat().st_size))


def remove(path: Path, others: list[Path], generator: random.Random) -> None:
    path.unlink()


DAMAGES: tuple[Damage, ...] = (
    flip_one_bit,
    flip_one_bit,
    flip_bytes,
    flip_bytes,
    flip_in_header,
    zero_a_page,
    swap_pages,
    truncate,
    truncate_to_pages,
    extend,
    swap_records,
    replace_payload,
    replace_by_noise,
    remove,
)
"""Chosen uniformly; entries that occur twice are twice as likely."""


def _flip(
    path: Path, generator: random.Random, count: int, change: Callable[[int], int], stop: int | None = None
) -> None:
    with path.open("r+b") as file:
        for _ in range(count):
            position = generator.randrange(min(stop or 1 << 62, path.stat().st_size))
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([change(byte)]))
