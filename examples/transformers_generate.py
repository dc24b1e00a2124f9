"""Store and load the KV cache of prompts under Hugging Face transformers, without vLLM.

A prompt is computed once (prefill) by a Llama with random weights. Its KV is in a paged cache, as in a serving
engine, and lmcache-async stores it. The paged cache is cleared, the KV is loaded into other blocks, and decoding
continues from there. The program prints the time of a prefill, the times of a load from host memory and from disk, and
their limits: one contiguous copy of as many bytes, and plain reads of the files on the disk. It checks the result:

- the loaded KV is equal to the computed KV, bit for bit;
- logits decoded from it are equal to those of the whole text computed at once, within the precision of bfloat16.

    python examples/transformers_generate.py --device cuda --tokens 2048,8192,32768,131072
    python examples/transformers_generate.py --device cpu       # a small model, in some seconds
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from lmcache_async import CacheEngine, KVLayout, Namespace, load_config

BLOCK = 16  # tokens of a block of the paged cache
DECODED = 4  # tokens after the prompt, whose logits are compared
REPEATS = 3  # times are the median of as many prefills and loads
PIN_S = 120  # longest wait for the arena to be pinned
BUS_BYTES = 1 << 30  # bytes of one contiguous copy; more are several, one after the other
READERS, READ_BYTES = 8, 8 << 20  # threads of plain reads, and bytes of one read
TOLERANCE = 0.1  # of logits, relative: with 10 results in each of 32 layers rounded to 2**-9, 3.5 % are usual
LLAMA_3_8B = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}  # else the defaults
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"cuda": "2048,8192,32768,131072", "cpu": "512,1024,2048"}


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer, in blocks of a paged cache. transformers calls `update` in each forward pass.

    Args:
        cache: The cache, whose block table is shared by all layers.
        kv: Paged memory of the layer: [K and V, block, token in its block, head, element].
    """

    def __init__(self, cache: PagedCache, kv: torch.Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.slots = kv.flatten(1, 2)  # [K and V, slot, head, element]; a view, not a copy
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values of shape [1, head, token, element]; return those of all tokens."""
        start, self.length = self.length, self.length + key_states.shape[2]
        target = self.cache.slots(start, self.length)
        self.slots[0].index_copy_(0, target, key_states[0].transpose(0, 1))
        self.slots[1].index_copy_(0, target, value_states[0].transpose(0, 1))
        if start == 0:
            return key_states, value_states
        # Serving engines have attention kernels that read the blocks in place. transformers does not.
        keys, values = self.read(self.length)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def read(self, length: int) -> torch.Tensor:
        """Return a copy of the first tokens: [K and V, token, head, element]."""
        return self.slots.index_select(1, self.cache.slots(0, length))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # the memory exists from the start

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.num_blocks * BLOCK


class PagedCache(Cache):
    """A paged KV cache for one sequence. Its blocks are in random order, as in a server after some hours."""

    def __init__(self, config: LlamaConfig, tokens: int, device: str) -> None:
        self.num_blocks = -(-tokens // BLOCK)
        shape = (2, self.num_blocks, BLOCK, config.num_key_value_heads, config.head_dim)
        self.memory = [
            torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(config.num_hidden_layers)
        ]
        self.block_table = torch.randperm(self.num_blocks).to(device)
        super().__init__(layers=[PagedLayer(self, kv) for kv in self.memory])

    def layout(self) -> KVLayout:
        """Describe the memory for the engine: K and V of each layer as [block, head, token, element]."""
        layers = [[part.transpose(1, 2) for part in kv.unbind(0)] for kv in self.memory]
        return KVLayout.from_block_views(layers, num_blocks=self.num_blocks, block_size=BLOCK)

    def blocks(self, tokens: int) -> torch.Tensor:
        """Return the block ids of the first tokens, in host memory."""
        return self.block_table[: -(-tokens // BLOCK)].cpu()

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Return the slots of the tokens from `start` to `stop`: block id x BLOCK + place in the block."""
        position = torch.arange(start, stop, device=self.block_table.device)
        return self.block_table[position // BLOCK] * BLOCK + position % BLOCK

    def clear(self) -> None:
        """Forget the sequence, erase the memory, and give the next sequence the blocks in another order."""
        self.set_length(0)
        for kv in self.memory:
            kv.zero_()
        self.block_table = self.block_table.flip(0)

    def set_length(self, tokens: int) -> None:
        for layer in self.layers:
            layer.length = tokens

    def read(self, tokens: int) -> Iterator[torch.Tensor]:
        """Yield the bits of the first tokens of each layer."""
        return (layer.read(tokens).view(torch.int16) for layer in self.layers)


@dataclass(frozen=True)
class Row:
    """Times and checks of one number of tokens. Times in seconds.

    Attributes:
        kv_bytes: Bytes of the prompt's KV.
        bus_s: Time of one contiguous copy of as many bytes from pinned host memory to the GPU.
        disk_s: Time of a load from disk; None if it is not measured yet.
        read_s: Time of plain reads of the same files, past the page cache.
        kv_equal: The KV loaded from memory, and that loaded from disk, is bit-equal to the computed one.
        difference: Largest relative difference of logits after a load from those computed again.
        without_kv: The same if the KV is not loaded. It shows that the comparison would notice.
    """

    tokens: int
    kv_bytes: int
    prefill_s: float
    bus_s: float
    memory_s: float
    disk_s: float | None
    read_s: float | None
    kv_equal: bool
    difference: float
    without_kv: float

    @property
    def passed(self) -> bool:
        return self.kv_equal and self.difference < TOLERANCE < self.without_kv


def random_llama(device: str, positions: int) -> Any:
    """Return a Llama with random weights: the shape of Llama 3 8B on a GPU, a small one on a CPU."""
    sizes = LLAMA_3_8B if device == "cuda" else SMALL
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = LlamaConfig(max_position_embeddings=positions, rope_parameters=rope, **sizes)
    config.initializer_range = 1.2 * config.hidden_size**-0.5  # so that attention is not uniform
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def forward(model: Any, tokens: torch.Tensor, cache: PagedCache | None, keep: int = 1) -> torch.Tensor:
    """Run the model over new tokens of shape [1, n]; return the logits of the last `keep` tokens."""
    output = model(tokens, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep)
    return output.logits[0].float()


def decode(model: Any, tokens: torch.Tensor, cache: PagedCache) -> torch.Tensor:
    """Run the model over new tokens one by one; return the logits of all."""
    return torch.cat([forward(model, token, cache) for token in tokens.split(1, dim=1)])


async def timed(device: str, before: Callable[[], None], call: Callable[[], Awaitable[object]]) -> float:
    """Return the median seconds of a call and of all that it submits to the GPU."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken = []
    for _ in range(REPEATS):
        before()
        synchronize()
        start = time.perf_counter()
        await call()
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


async def bus_seconds(nbytes: int, device: str) -> float:
    """Return the median seconds of contiguous copies of `nbytes` in all, from pinned host memory to the device."""
    source = torch.empty(min(nbytes, BUS_BYTES), dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)

    async def copy() -> None:
        for start in range(0, nbytes, len(source)):
            part = slice(nbytes - start)
            target[part].copy_(source[part], non_blocking=True)

    return await timed(device, lambda: None, copy)


def read_seconds(directory: str) -> float:
    """Return the seconds of plain reads of all files in a directory, past the page cache if the file system can do that."""
    files = [file for file in Path(directory).rglob("*") if file.is_file()]
    with contextlib.ExitStack() as stack:
        buffers = [stack.enter_context(mmap.mmap(-1, READ_BYTES)) for _ in range(READERS)]
        for buffer in buffers:
            buffer[:] = bytes(READ_BYTES)  # its pages exist before the first read
        pool = stack.enter_context(ThreadPoolExecutor(READERS))
        start = time.perf_counter()
        list(pool.map(read_files, [files[first::READERS] for first in range(READERS)], buffers))
        return time.perf_counter() - start


def read_files(files: list[Path], buffer: mmap.mmap) -> None:
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            descriptor = os.open(file, os.O_RDONLY)
        with os.fdopen(descriptor, "rb", buffering=0) as source:
            while source.readinto(buffer) == READ_BYTES:
                pass


def relative(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@contextlib.asynccontextmanager
async def open_engine(cache: PagedCache, tier: Any, kv_bytes: int) -> AsyncIterator[CacheEngine]:
    """Open an engine for a paged cache, with one tier and host memory for one prompt."""
    layout = cache.layout()
    arena_bytes = (64 << 20) + kv_bytes * 11 // 10
    settings: dict[str, Any] = {"arena.max_bytes": arena_bytes, "tiers": [tier]}
    # The defaults are for servers, where a store gives up rather than wait for a slow disk. Here all is stored.
    settings |= {"store.max_pending_write_bytes": arena_bytes, "store.max_pending_write_s": 600}
    settings |= {"store.timeout_s": 600, "retrieve.timeout_s": 600, "shutdown_timeout_s": 600}
    config = load_config(env={}, extra=settings)
    names = {"model": "random-llama", "weights": "seed 0", "dtype": layout.dtype, "layout": layout.text}
    namespace = Namespace(**names, chunk_size=config.chunk_size)
    async with CacheEngine.open(config, layout=layout, namespace=namespace) as engine:
        if layout.device.type == "cuda":
            await arena_pinned(engine)
        yield engine


async def arena_pinned(engine: CacheEngine) -> None:
    """Wait until the arena is pinned, which is done in the background. Copies of other memory are slower."""
    deadline = time.monotonic() + PIN_S
    while (arena := engine.statistics().arena).pinned_bytes < arena.num_slabs * arena.slab_bytes:
        if time.monotonic() > deadline:
            total = arena.num_slabs * arena.slab_bytes
            raise RuntimeError(
                f"{arena.pinned_bytes} of {total} bytes of the arena are pinned after {PIN_S} s"
            )
        await asyncio.sleep(0.01)


async def measure(model: Any, tokens: int, device: str, directory: str) -> AsyncIterator[Row]:
    """Measure and check one length of prompts. Yield its row without the load from disk, then with it."""
    generator = torch.Generator().manual_seed(tokens)
    text = torch.randint(model.config.vocab_size, (1, tokens + DECODED), generator=generator)
    prompt_ids = text[0, :tokens].tolist()
    prompt, rest = text.to(device).split([tokens, DECODED], dim=1)

    # Expected logits: those of the whole text, computed at once without a cache.
    expected = forward(model, text.to(device), None, keep=DECODED)
    cache = PagedCache(model.config, tokens + DECODED, device)
    cache.set_length(tokens)
    without_kv = relative(decode(model, rest, cache), expected)

    async def prefill() -> None:
        forward(model, prompt, cache)

    prefill_s = await timed(device, cache.clear, prefill)
    computed = list(cache.read(tokens))
    kv_bytes = sum(layer.nbytes for layer in computed)
    bus_s = await bus_seconds(kv_bytes, device)

    loads: dict[str, float] = {}
    differences, equal = [], True
    disk = {"name": "disk", "path": directory, "max_bytes": 2 * kv_bytes + (1 << 30)}
    for source, tier in (("memory", "cpu"), ("disk", disk)):
        async with open_engine(cache, tier, kv_bytes) as engine:
            report = await engine.store(prompt_ids, cache.blocks(tokens))
            if report.dropped:
                raise RuntimeError(f"{tokens} tokens were not stored to {source}: {dict(report.dropped)}")

            async def load(engine: CacheEngine = engine) -> None:
                loaded = await engine.retrieve(prompt_ids, cache.blocks(tokens))
                if not loaded.all():
                    raise RuntimeError(f"only {int(loaded.sum())} of {tokens} tokens were loaded")
                cache.set_length(tokens)

            loads[source] = await timed(device, cache.clear, load)
        read_s = read_seconds(directory) if source == "disk" else None
        equal &= all(map(torch.equal, cache.read(tokens), computed))
        differences.append(relative(decode(model, rest, cache), expected))
        times = (prefill_s, bus_s, loads["memory"], loads.get("disk"), read_s)
        yield Row(tokens, kv_bytes, *times, equal, max(differences), without_kv)


HEAD = "  tokens     KV MiB   prefill s  one copy s  load from memory s     reads s    load from disk s  KV equal  logits differ by"


def line(row: Row) -> str:
    memory, disk = (f"{s:10.4f} ({row.prefill_s / s:5.1f}x)" if s else "" for s in (row.memory_s, row.disk_s))
    logits = f"{100 * row.difference:.2f} % ({100 * row.without_kv:.0f} % without KV)"
    return (
        f"{row.tokens:8} {row.kv_bytes / 2**20:10.1f} {row.prefill_s:11.4f}  {row.bus_s:10.4f}"
        f"  {memory:>18}  {row.read_s or 0:10.4f}  {disk:>18}  {'yes' if row.kv_equal else 'NO':>8}  {logits}"
    )


def save(path: Path, device: str, rows: list[Row]) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"device": device, "versions": versions, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


async def run(device: str, lengths: list[int], path: Path | None, results: Path | None) -> list[Row]:
    model = random_llama(device, positions=max(lengths) + DECODED)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    print(f"Llama: {layers} layers, {heads} KV heads of {model.config.head_dim}, bfloat16, on {name}\n{HEAD}")
    rows: dict[int, Row] = {}
    for tokens in [BLOCK, *lengths]:  # the first one is a warm-up
        try:
            with tempfile.TemporaryDirectory(prefix="transformers-generate-", dir=path) as directory:
                async for row in measure(model, tokens, device, directory):
                    if tokens == BLOCK:
                        continue
                    rows[tokens] = row
                    if results:
                        save(results, device, list(rows.values()))
                    if row.disk_s is not None:
                        print(line(row), flush=True)
        except torch.OutOfMemoryError:
            print(f"{tokens:8}  left out: not enough GPU memory")
            torch.cuda.empty_cache()
    return list(rows.values())


def lengths_of(text: str) -> list[int]:
    """Parse numbers of tokens; round them up to whole blocks."""
    return [-(-int(number) // BLOCK) * BLOCK for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Load the KV of prompts instead of computing it again.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(TOKENS), default=default)
    parser.add_argument("--tokens", type=lengths_of, help="lengths of prompts, e.g. 2048,8192")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--path", type=Path, help="directory for the disk tier; a temporary one by default")
    given = parser.parse_args()
    with torch.no_grad():
        lengths = given.tokens or lengths_of(TOKENS[given.device])
        rows = asyncio.run(run(given.device, lengths, given.path, given.json))
    failed = [row.tokens for row in rows if not row.passed]
    if failed or not rows:
        print(f"FAILED: {failed or 'nothing was measured'}")
        return 1
    print(f"passed: loaded KV is bit-equal, logits differ by less than {100 * TOLERANCE:.0f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
