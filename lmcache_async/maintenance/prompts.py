"""Prompts from a file: token ids or text, one per line, or a trace of requests with either."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lmcache_async.errors import ConfigError, MissingDependencyError

_IDS = ("prompt_token_ids", "token_ids", "tokens", "prompt")
_TEXTS = ("prompt", "text")
_HASHES = ("hash_ids", "block_hashes")
MAX_BYTES = 4 << 30
"""Maximum size of a file after decompression. The file is read as a whole."""

Encode: TypeAlias = Callable[[str], Sequence[int]]
Prompt: TypeAlias = str | bytes
"""A prompt as text, or the bytes of its token ids as int32."""


def read_prompts(path: Path, *, by_use: bool) -> list[tuple[Prompt, int]]:
    """Return the distinct prompts of the file, each with the number of its occurrences.

    Each line is JSON: a list of token ids, a text, or an object with either, as in request logs. A document
    with `requests`, which may be nested, is a trace of sessions. Files with the suffix .gz are decompressed. With
    `by_use`, the most frequent prompts come first; otherwise they are in the order of the file.
    """
    counts = Counter(_prompt_of(row, where) for where, row in _rows(path))
    if not counts:
        raise ConfigError(f"{path} has no prompts")
    return counts.most_common() if by_use else list(counts.items())


def tokenizer_of(name: str) -> Encode:
    """Return the encoder of a tokenizer. `name` is its `tokenizer.json`, the folder of that file, or a model name."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "--tokenizer needs the package tokenizers, which comes with vLLM"
        ) from error
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file() and (path.is_dir() or name.startswith(("/", "."))):  # never a model's name
        raise ConfigError(f"--tokenizer: there is no file {file}")
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the package raises Exception itself
        raise ConfigError(f"--tokenizer {name}: {error}") from error

    def encode(text: str) -> Sequence[int]:
        try:
            return list(tokenizer.encode(text).ids)
        except Exception as error:  # such as TypeError for text that is not valid Unicode
            raise ConfigError(
                f"--tokenizer {name} cannot encode the prompt {text[:60]!r}: {error}"
            ) from error

    return encode


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a truncated or damaged gzip file
        raise ConfigError(f"cannot read {path}: {error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes: split it")
    document: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # not one document: the lines are parsed below
        document = json.loads(data)
    if _has_requests(document):
        yield from _nested(document, str(path))
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not JSON: {error}") from None


def _has_requests(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("requests"), list)


def _nested(document: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for number, request in enumerate(document["requests"], 1):
        place = f"{where}, request {number}"
        if _has_requests(request):
            yield from _nested(request, place)
        else:
            yield place, request


def _prompt_of(row: Any, where: str) -> Prompt:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        for name in _IDS:
            if isinstance(row.get(name), list):
                return _ids(row[name], f"{where}: {name}")
        for name in _TEXTS:
            if isinstance(row.get(name), str):
                return str(row[name])
        if any(name in row for name in _HASHES):
            raise ConfigError(
                f"{where}: a trace of block hashes has no tokens, and its hashes are not the keys of records: use a"
                " trace with prompt_token_ids or prompt in each request"
            )
        raise ConfigError(
            f"{where}: expected one of {', '.join(dict.fromkeys((*_IDS, *_TEXTS)))}; found {sorted(row)}"
        )
    return _ids(row, where)


def _ids(value: Any, where: str) -> bytes:
    whole = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    if not whole or not value:
        raise ConfigError(f"{where}: expected token ids, such as [1, 15043, 29892]")
    return np.array(value, dtype=np.int32).tobytes()
