"""Fingerprint of the weights of a local model, which distinguishes models of the same name.

It depends only on file names inside the folder of the model, sizes and bytes. It does not depend on times or
on the path of the folder, so it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xxhash

from lmcache_async.errors import ConfigError
from lmcache_async.hashing.digest import CRYPTOGRAPHIC
from lmcache_async.hashing.namespace import canonical_text

FingerprintMode: TypeAlias = Literal["sampled", "full"]

# Only the first group with a file is fingerprinted, because vLLM loads that group from a folder with both by default.
_WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth", "*.gguf"))
# Conversion of images, audio and video to embeddings. Chat templates only change token ids, which keys cover.
_PROCESSOR = ("*processor_config.json",)
# Read completely: they define which weights are used, and how.
_SETTINGS = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "*quant*.json",
    "*.index.json",
    "*.py",
    *_PROCESSOR,
)
_MISTRAL_TOKENIZER = ("tekken.json",)  # contains the image and audio settings of models in Mistral's format

_SHARD = re.compile(r"(.+)-\d+-of-(\d+\.gguf)")
"""Name of a part of a GGUF model, such as `model-00001-of-00003.gguf`."""

_SAMPLE_BYTES = 4096
# The table of a GGUF file is at the start; that of a zip (.bin, .pt), with CRCs of all members, at the end.
_END_BYTES = 1 << 20
_STRIDE_BYTES = 1 << 20
_MAX_SAMPLES = 4096
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_THREADS = 8  # reads in flight; most of the time is disk latency


def weights_fingerprint(
    path: Path,
    *,
    mode: FingerprintMode = "sampled",
    algorithm: str = "xxh3_128",
    ignore_safetensors: bool = False,
) -> str:
    """Compute the fingerprint of a model.

    Both modes read the settings of the model completely. `full` reads every byte of the weights. `sampled`
    reads the header of each safetensors file and 4 KiB at the start, middle and end of each tensor, and
    4 KiB of each MiB of other files. It detects models that were trained or quantised anew. Only `full`
    detects a change of single numbers.

    The call blocks: run it in a worker thread.

    Args:
        path: Folder of the model, or its file; of several GGUF files, any one.
        mode: `sampled` or `full`.
        algorithm: Hash algorithm of the chunk keys. For a cryptographic one the fingerprint uses SHA-256 and
            contains its name (`full:sha256:...`), so that other weights with the same fingerprint cannot be
            constructed.
        ignore_safetensors: The model is loaded from files of other formats, even if there are safetensors files.

    Returns:
        The mode and 32 hex digits, as `mode:digits`.

    Raises:
        FileNotFoundError: `path` does not exist, as for a hub name, or has no weights.
        ValueError: A safetensors file is malformed.
        ConfigError: The mode is unknown.
    """
    if mode not in ("sampled", "full"):
        raise ConfigError(f"fingerprint mode {mode!r} is unknown; expected sampled or full")
    if not path.exists():
        raise FileNotFoundError(
            f"there is no model at {path}; expected a local path, not the name of a model on a hub"
        )
    weights = _weight_files(path, _WEIGHTS[1:] if ignore_safetensors else _WEIGHTS)
    settings = _matches(path, _SETTINGS) if path.is_dir() else []
    describe = partial(_describe, _hash_function(algorithm))
    prefix = f"{mode}:sha256" if algorithm in CRYPTOGRAPHIC else mode
    with ThreadPoolExecutor(_THREADS, "lmcache-async-fingerprint") as pool:
        described = pool.map(partial(describe, sampled=mode == "sampled"), weights)
        entries = [*described, *map(describe, settings)]
    return f"{prefix}:{_combined_digest(_hash_function(algorithm), entries)}"


def processor_fingerprint(path: Path, *, algorithm: str = "xxh3_128") -> str:
    """Compute the fingerprint of the files that configure the processing of images, audio and video.

    The call blocks: run it in a worker thread.

    Args:
        path: Folder of the model.
        algorithm: As for `weights_fingerprint`.

    Returns:
        32 hex digits; empty if there is no such file.
    """
    new = _hash_function(algorithm)
    entries = [_describe(new, file) for file in _matches(path, (*_PROCESSOR, *_MISTRAL_TOKENIZER))]
    return _combined_digest(new, entries) if entries else ""


def _hash_function(algorithm: str) -> Callable[..., Any]:
    return hashlib.sha256 if algorithm in CRYPTOGRAPHIC else xxhash.xxh3_128


def _combined_digest(new: Callable[..., Any], entries: list[tuple[str, int, str]]) -> str:
    digest: str = new(canonical_text(sorted(entries)).encode()).hexdigest()
    return digest[:32]


def _weight_files(path: Path, groups: Sequence[Sequence[str]]) -> list[Path]:
    if not path.is_dir():
        return _shards(path)
    for patterns in groups:
        if files := _matches(path, patterns):
            return files
    known = ", ".join(pattern for patterns in groups for pattern in patterns)
    raise FileNotFoundError(f"there are no weights in {path}; expected {known}")


def _shards(path: Path) -> list[Path]:
    """Return the files of the model that `path` is a part of: all shards are loaded if the path of one is given."""
    name = _SHARD.fullmatch(path.name)
    if name is None:
        return [path]
    found = {file: _SHARD.fullmatch(file.name) for file in path.parent.iterdir()}
    return sorted(file for file, other in found.items() if other and other.groups() == name.groups())


def _matches(folder: Path, patterns: Iterable[str]) -> list[Path]:
    # Dangling links are included, so that the error of opening one contains its name.
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if not file.is_dir()})


def _describe(new: Callable[[], Any], path: Path, *, sampled: bool = False) -> tuple[str, int, str]:
    """Return name, size and digest of a file. `new()` creates a hash."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if sampled:
            digest = new()
            # No read-ahead, which is 32 times a sample.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            samples = (
                _safetensors_ranges(file, size) if path.suffix == ".safetensors" else _sampled_ranges(size)
            )
            for offset, nbytes in samples:
                digest.update(_read(file, offset, nbytes))
        else:
            digest = hashlib.file_digest(file, new)
            if file.tell() != size:
                raise ValueError(f"{path} changed its length while it was read")
    return path.name, size, digest.hexdigest()


def _sampled_ranges(size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of both ends, and of 4 KiB at each stride between them."""
    yield 0, min(size, _END_BYTES)
    for offset in range(_END_BYTES, size - _END_BYTES, max(_STRIDE_BYTES, size // _MAX_SAMPLES)):
        yield offset, _SAMPLE_BYTES
    if size > _END_BYTES:
        yield size - _END_BYTES, _END_BYTES


def _safetensors_ranges(file: FileIO, size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the header, and of 4 KiB at the start, middle and end of each tensor."""
    if size < 8:
        raise ValueError(f"{file.name} is not a safetensors file: it has only {size} bytes")
    header_bytes = int.from_bytes(_read(file, 0, 8), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(
            f"{file.name} is not a safetensors file: its header has {header_bytes} bytes, the file {size}"
        )
    yield 8, header_bytes
    start = 8 + header_bytes
    for begin, end in _spans(_read(file, 8, header_bytes), size - start, str(file.name)):
        if end - begin <= 3 * _SAMPLE_BYTES:
            yield start + begin, end - begin
            continue
        for at in (begin, begin + (end - begin - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
            yield start + at, _SAMPLE_BYTES


def _spans(header: bytes, data_bytes: int, name: str) -> list[tuple[int, int]]:
    """Return the start and end of each tensor in the data, sorted."""
    try:
        entries: Any = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not a safetensors file: its header is not JSON") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{name} is not a safetensors file: its header is not a JSON object")  # noqa: TRY004  the file is wrong
    spans = []
    for tensor, entry in entries.items():
        if tensor == "__metadata__":
            continue
        match entry:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end <= data_bytes:
                spans.append((begin, end))
            case _:
                raise ValueError(
                    f"{name}: tensor {tensor!r} is outside of the {data_bytes} data bytes of the file"
                )
    return sorted(spans)


def _read(file: FileIO, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    data = b""
    while len(data) < nbytes:
        part = file.read(nbytes - len(data))
        if not part:
            raise ValueError(f"{file.name} was truncated while it was read")
        data += part
    return data
