"""Directories of the disk tier as version 0.1 (commit da0f82e) left them: what they hold, and the program that wrote them.

`v01_store.tar.xz` is written by 0.1, not by the version under test. To write it again:

    git worktree add --detach ../v01 da0f82e
    cd ../v01 && python setup.py build_ext --inplace && cd -
    PYTHONPATH=../v01 python tests/compatibility/v01_store.py

Only public names that both versions have are used here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lmcache_async import CacheEngine, KVLayout, Namespace, RequestNamespace, load_config
from lmcache_async.hashing import ChunkHasher, Extra, weights_fingerprint

ARCHIVE = Path(__file__).parent / "v01_store.tar.xz"
CHUNK, BLOCK, BLOCKS = 8, 4, 64
SECRET = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
RECORD_FILE_BYTES = 8192


@dataclass(frozen=True)
class Prompt:
    """A prompt of `length` tokens. Prompts with the same `first` share a prefix."""

    name: str
    first: int
    length: int
    namespace: RequestNamespace = field(default_factory=RequestNamespace)

    @property
    def tokens(self) -> list[int]:
        return [self.first + 7 * position % 1000 for position in range(self.length)]


@dataclass(frozen=True)
class Case:
    """A directory, the settings of its engine, and the prompts stored, in order.

    Attributes:
        secrets: Environment variables of the engine.
        use: Prompts loaded (and so recently used) before those of `then` were stored.
        kill_at: Number of the record whose publication killed the writer; 0 for none.
    """

    name: str
    prompts: tuple[Prompt, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    disk: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "xxh3_128"
    use: tuple[Prompt, ...] = ()
    then: tuple[Prompt, ...] = ()
    kill_at: int = 0


LONG = Prompt("long", 100, 40)
PARTIAL = Prompt("partial", 300, 20)  # two chunks and a partial chunk of one block
SHORT = Prompt("short", 100, 16)
OTHERS = (
    Prompt("salt", 100, 16, RequestNamespace(cache_salt="tenant-1")),
    Prompt("tags", 100, 16, RequestNamespace(tags=(("team", "search"), ("unit", "7")))),
    Prompt("adapter", 100, 16, RequestNamespace(lora="french", lora_path="content-of-its-weights")),
)
OLD, USED, NEW, NEXT = (
    Prompt("old", 2000, 24),
    Prompt("used", 3000, 24),
    Prompt("new", 4000, 24),
    Prompt("next", 5000, 16),
)
CASES = (
    Case("plain", (LONG, PARTIAL, *OTHERS)),
    Case(
        "sha256",
        (LONG,),
        {"hash_algorithm": "sha256"},
        {"LMCACHE_ASYNC_HASH_KEY": SECRET},
        algorithm="sha256",
    ),
    Case("encrypted", (SHORT,), secrets={"LMCACHE_ASYNC_ENCRYPTION__KEYS": SECRET}),
    Case("durable", (LONG,), disk={"fsync": True, "odirect": False, "quarantine": True}),
    Case(
        "compressed",
        (LONG,),
        {
            "store.stages": ["hash", "lookup", "allocate", "device_to_host", "seal", "zlib", "write"],
            "retrieve.stages": ["hash", "plan", "fetch", "unzlib", "verify", "host_to_device"],
        },
    ),
    Case("evicted", (USED, OLD), disk={"max_bytes": 7 * RECORD_FILE_BYTES}, use=(USED,), then=(NEW,)),
    Case("killed", (LONG,), disk={"io_threads": 1}, kill_at=4),
)


class Cache:
    """A small paged KV cache, and engines for it."""

    def __init__(self, weights: Path) -> None:
        self.tensors = [
            (torch.zeros(BLOCKS, BLOCK, 1, 8), torch.zeros(BLOCKS, BLOCK, 1, 8)) for _ in range(2)
        ]
        self.layout = KVLayout.from_token_slots(self.tensors, order="BNHD")
        self._weights = weights

    def namespace(self, case: Case) -> Namespace:
        return Namespace(
            model="model-of-0.1",
            weights=weights_fingerprint(self._weights, algorithm=case.algorithm),
            dtype=self.layout.dtype,
            layout=self.layout.text,
            quantization="none",
            tp_rank=1,
            tp_size=2,
            world_size=2,
            chunk_size=CHUNK,
            algorithm=case.algorithm,
            hash_key=bytes.fromhex(SECRET) if case.algorithm == "sha256" else b"",
            extra=(("block_size", str(BLOCK)), ("kv_cache_dtype", "auto")),
        )

    def open(
        self, case: Case, directory: Path, registry: Any = None
    ) -> AbstractAsyncContextManager[CacheEngine]:
        disk = {"name": "disk", "path": str(directory), "max_bytes": "1MiB", "odirect": "auto", **case.disk}
        config = load_config(
            env=case.secrets,
            extra={
                "chunk_size": CHUNK,
                "arena.max_bytes": "1MiB",
                "tiers": ["cpu", disk],
                **case.settings,
            },
        )
        return CacheEngine.open(config, layout=self.layout, namespace=self.namespace(case), registry=registry)

    def write(self, tokens: list[int]) -> None:
        """Write the KV that a model would compute for the prompt into the first slots."""
        values = kv_of(tokens)
        for layer, pair in enumerate(self.tensors):
            for part, cache in enumerate(pair):
                cache.view(-1, 8)[: len(tokens)] = values[layer, part]

    def read(self, first_slot: int, num_tokens: int) -> torch.Tensor:
        """Content of slots, shape [layers, 2, num_tokens, 8]."""
        slots = slice(first_slot, first_slot + num_tokens)
        return torch.stack([torch.stack([part.view(-1, 8)[slots] for part in pair]) for pair in self.tensors])

    def keys(self, case: Case, prompt: Prompt) -> list[str]:
        """Keys of the prompt's chunks, including the partial one at its end."""
        namespace = self.namespace(case)
        root = prompt.namespace.root(namespace.root(), namespace.algorithm, namespace.hash_key)
        hasher = ChunkHasher(
            root, chunk_size=CHUNK, algorithm=namespace.algorithm, hash_key=namespace.hash_key
        )
        chunks = hasher.extend(np.asarray(prompt.tokens, np.int32))
        return [chunk.key.hex() for chunk in [*chunks, *hasher.partials(BLOCK)]]


def kv_of(tokens: list[int]) -> torch.Tensor:
    """KV that depends on each token and all tokens before it, exactly representable: shape [2, 2, tokens, 8]."""
    history = np.cumsum(np.asarray(tokens, np.int64) * (1 + np.arange(len(tokens)))) % 4096
    scale = np.arange(1, 33).reshape(2, 2, 1, 8)
    return torch.as_tensor(history[None, None, :, None] * scale / 8, dtype=torch.float32)


def write_weights(directory: Path) -> Path:
    """Write small files in place of a model's or an adapter's weights."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    for name, nbytes in (("model-1.safetensors", 300_000), ("model-2.safetensors", 5_000)):
        tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
        header = json.dumps({"weight": tensor}).encode()
        (directory / name).write_bytes(len(header).to_bytes(8, "little") + header + generator.bytes(nbytes))
    (directory / "config.json").write_text('{"hidden_size": 8}', encoding="utf-8")
    return directory


def fingerprints(directory: Path) -> dict[str, str]:
    """Fingerprints of the weights by mode and algorithm."""
    return {
        f"{mode}/{algorithm}": weights_fingerprint(directory, mode=mode, algorithm=algorithm)
        for mode in ("sampled", "full")
        for algorithm in ("xxh3_128", "sha256")
    }


def other_keys() -> list[str]:
    """Keys of chunks with extra content, as images have it, and of every partial length."""
    hasher = ChunkHasher(bytes(range(16)), chunk_size=CHUNK, extras=(Extra(6, 19, "image-hash"),))
    chunks = hasher.extend(np.arange(30, dtype=np.int32))
    return [chunk.key.hex() for chunk in [*chunks, *hasher.partials(1)]]


def vllm_namespace() -> dict[str, Any]:
    """Fields of the connector's namespace for a model in vLLM, without the version of vLLM."""
    from lmcache_async.integration.vllm.config import namespace_of

    layers = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    spec = SimpleNamespace(block_size=16, head_size=64)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="company/model",
            revision=None,
            dtype="torch.bfloat16",
            quantization="fp8",
            multimodal_config=None,
            hf_config=SimpleNamespace(
                to_dict=lambda: {"hidden_size": 64, "rope": {"theta": 1e4}, "_name_or_path": "/models/m"}
            ),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=2, world_size=4, rank=3
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        lora_config=None,
        speculative_config=SimpleNamespace(method="eagle", model="company/draft"),
        compilation_config=SimpleNamespace(
            static_forward_context={
                name: SimpleNamespace(get_attn_backend=lambda: backend) for name in layers
            }
        ),
    )
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=layers)], kv_cache_layout="NHD"
    )
    config = load_config(env={}, extra={"weights_fingerprint": "text:weights-7"})
    fields = json.loads(namespace_of(vllm_config, kv_cache_config, config, "layout-text").text)
    fields["extra"] = [[name, value] for name, value in fields["extra"] if name != "vllm"]
    return dict(fields)


# Only version 0.1 runs the rest.


async def fill(case: Case, directory: Path, weights: Path, registry: Any) -> None:
    cache = Cache(weights)

    async def store(engine: CacheEngine, prompt: Prompt) -> None:
        cache.write(prompt.tokens)
        await engine.store(prompt.tokens, range(prompt.length), namespace=prompt.namespace)
        assert await engine.flush(timeout_s=30)

    async with cache.open(case, directory, registry) as engine:
        for prompt in case.prompts:
            await store(engine, prompt)
    for prompt in case.use:  # read from disk by an engine with empty memory
        async with cache.open(case, directory, registry) as engine:
            assert (await engine.retrieve(prompt.tokens, range(64, 64 + prompt.length))).all()
    if case.then:
        async with cache.open(case, directory, registry) as engine:
            for prompt in case.then:
                await store(engine, prompt)


def kill_at_publication(number: int) -> None:
    real, published = os.replace, 0

    def replace(*args: Any, **options: Any) -> None:
        nonlocal published
        published += 1
        if published == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **options)

    os.replace = replace


def compression() -> Any:
    """The compressing stages of the frozen distribution, which need no installation here."""
    sys.path.insert(0, str(Path(__file__).parent / "v01_distribution" / "src"))
    from lmcache_async_zlib import CompressStage, DecompressStage

    from lmcache_async.testing import FakeRegistry

    return FakeRegistry(stages={"zlib": CompressStage, "unzlib": DecompressStage})


def record_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("rank-1/[0-9a-f][0-9a-f]/*"))


def fill_in_child(case: Case, directory: Path, weights: Path) -> None:
    command = [sys.executable, __file__, case.name, str(directory), str(weights)]
    ended = subprocess.run(command, check=False).returncode
    assert ended == (-signal.SIGKILL if case.kill_at else 0)


def main() -> None:
    if len(sys.argv) > 1:
        case = next(case for case in CASES if case.name == sys.argv[1])
        if case.kill_at:
            kill_at_publication(case.kill_at)
        registry = compression() if case.name == "compressed" else None
        asyncio.run(fill(case, Path(sys.argv[2]), Path(sys.argv[3]), registry))
        return
    with tempfile.TemporaryDirectory() as folder:
        root, weights = Path(folder) / "store", write_weights(Path(folder) / "weights")
        manifest: dict[str, Any] = {
            "fingerprints": fingerprints(weights),
            "other_keys": other_keys(),
            "vllm_namespace": vllm_namespace(),
            "cases": {},
        }
        for case in CASES:
            fill_in_child(case, root / case.name, weights)
            prompts = {*case.prompts, *case.then}
            manifest["cases"][case.name] = {
                "namespace": Cache(weights).namespace(case).text,
                "keys": {prompt.name: Cache(weights).keys(case, prompt) for prompt in prompts},
                "records": record_names(root / case.name),
            }
        after = Path(folder) / "after"
        shutil.copytree(root / "evicted", after, copy_function=shutil.copy2)
        one_more = Case("evicted", (NEXT,), disk=CASES[-2].disk)
        asyncio.run(fill(one_more, after, weights, None))
        manifest["evicted_by_next"] = sorted(set(record_names(root / "evicted")) - set(record_names(after)))
        manifest["times"] = {
            str(path.relative_to(root)): path.stat().st_mtime_ns
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }
        (root / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(root, ".", filter=anonymous)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(directory: Path) -> dict[str, Any]:
    """Unpack the directories of all cases, and return the manifest."""
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            archive.extraction_filter = staticmethod(tarfile.data_filter)
        archive.extractall(directory)
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    for name, time_ns in manifest["times"].items():
        os.utime(directory / name, ns=(time_ns, time_ns))
    return manifest


if __name__ == "__main__":
    main()
