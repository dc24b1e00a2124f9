"""Random configurations of a simulation: sizes, tiers and faults, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pydantic import SecretStr

from lmcache_async.config import EngineConfig
from lmcache_async.config.model import EncryptionConfig
from lmcache_async.config.secrets import SECRET_BYTES
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.testing.rig import Rig
from tests.simulation.faults import ODDS, FaultInjector, Faults, Odds
from tests.simulation.model import Prompt, make_prompts
from tests.simulation.tiers import Backend

CHUNK = 4
MAX_TOKENS = 24
CLIENTS = 4
FILES = "files"
"""Id of the real disk tier, if a stack has one."""

STORE_S, RETRIEVE_S, SHUTDOWN_S = 3.0, 2.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Configuration of a simulation. It stays the same over crashes.

    Attributes:
        all_fits: Whether nothing is evicted, refused or damaged, so that every hit is expected.
        call_s: Deadline of one call to a tier, in seconds.
        backends: Backends of the simulated tiers, by id of the tier.
        slow_tiers: Number of tiers that outlive a process.
        has_files: Whether the real disk tier is one of them.
        encrypted: Whether their records are encrypted.
    """

    rig: Rig
    config: EngineConfig
    prompts: list[tuple[Prompt, ...]]
    backends: dict[str, Backend]
    slow_tiers: int
    has_files: bool
    encrypted: bool
    injector: FaultInjector
    all_fits: bool
    call_s: float


def draw_scenario(rng: Random, faults: Faults, folder: Path) -> Scenario:
    """Draw a configuration."""
    rig = Rig(layers=1, blocks=CLIENTS * MAX_TOKENS // 4, chunk_size=CHUNK, head_dim=2)
    prompts = make_prompts(
        rng,
        count=rng.randint(2, 10),
        max_tokens=MAX_TOKENS,
        chunk_size=CHUNK,
        row_bytes=rig.layout.payload_bytes(1),
    )
    chunks = len({number for group in prompts for prompt in group for number, _ in prompt.chunks})
    odds = (
        ODDS[faults].scaled(2 * rng.random())
        if faults is not Faults.NONE
        else Odds(cancel=0.1 * rng.random())
    )
    roomy = rng.random() < 0.5
    # The extra slabs are for the concurrent calls of all clients, and for pins.
    rig.slabs = chunks + 2 * CLIENTS * MAX_TOKENS // CHUNK if roomy else rng.randint(2, 16)
    call_s = rng.choice((0.5, 0.5, 5.0))  # shorter or longer than the deadline of a request
    injector = FaultInjector(rng, odds, call_timeout_s=call_s)
    stack = rng.choice(_STACKS)
    secrets = _draw_secrets(rng) if stack and rng.random() < 0.3 else {}
    if secrets:
        rig.hash_key = bytes.fromhex(secrets["hash_key"].get_secret_value())
        rig.slabs *= 2 if roomy else 1  # another one for each chunk that is being written
    backends = {
        name: Backend(
            injector,
            max_records=None if roomy or rng.random() < 0.3 else rng.randint(1, chunks),
            local_index=local_index,
            encrypted=bool(secrets),
        )
        for name, local_index in stack
        if name != FILES
    }
    names = [name for name, _ in stack]
    settings = _settings(rng, rig, names, roomy=roomy, call_s=call_s)
    for tier in settings["tiers"]:
        if tier["id"] == FILES:
            slabs = 2 * chunks if roomy else rng.randint(1, chunks)
            # Without direct I/O, because file systems differ in its support.
            tier |= {
                "path": str(folder),
                "max_bytes": slabs * rig.slab_bytes,
                "odirect": False,
                "io_threads": 2,
            }
    return Scenario(
        rig=rig,
        config=rig.config(**settings).model_copy(update=secrets),
        prompts=prompts,
        backends=backends,
        slow_tiers=len(stack),
        has_files=FILES in names,
        encrypted=bool(secrets),
        injector=injector,
        all_fits=roomy and faults is Faults.NONE,
        call_s=call_s,
    )


_STACKS: tuple[tuple[tuple[str, bool], ...], ...] = (
    (),
    (("disk", True),),
    (("disk", True),),
    (("remote", False),),
    (("disk", True), ("remote", False)),
    ((FILES, True),),
    ((FILES, True), ("remote", False)),
)


def _draw_secrets(rng: Random) -> dict[str, Any]:
    """Draw settings for encrypted records and for keyed hashes."""
    key = rng.randbytes(SECRET_BYTES)
    RecordCipher([key])  # fails early if the package is not installed
    return {
        "encryption": EncryptionConfig(keys=SecretStr(key.hex())),
        "hash_algorithm": "sha256",
        "hash_key": SecretStr(rng.randbytes(SECRET_BYTES).hex()),
    }


def draw_layers(rng: Random) -> list[Any]:
    """Draw the layers of a tier: the usual ones, ones with tight limits, or none."""
    retry = {"name": "retry", "seed": rng.randrange(1 << 30)}  # the same delays in every run
    usual = ["metrics", retry, "breaker", "deadline"]
    touchy = [
        {"name": "limit", "max_calls": rng.randint(1, 3)},
        retry | {"attempts": rng.randint(1, 5), "base_s": 0.01},
        {"name": "breaker", "min_calls": 2, "window_calls": 4, "pause_s": 0.05, "max_pause_s": 0.2},
        {"name": "deadline", "lookup_s": 0.2, "write_s": 0.4},
    ]
    return rng.choice((usual, touchy, []))


def _settings(rng: Random, rig: Rig, slow: list[str], *, roomy: bool, call_s: float) -> dict[str, Any]:
    cpu: dict[str, Any] = {"name": "cpu", "id": "cpu"}
    if not roomy and rng.random() < 0.5:
        cpu["max_bytes"] = rng.randint(1, rig.slabs) * rig.slab_bytes
    tiers = [
        {"name": f"simulated_{name}", "id": name, "timeout_s": call_s, "layers": draw_layers(rng)}
        for name in slow
    ]
    alone = bool(tiers) and rng.random() < 0.2
    slabs = rig.slabs
    in_flight = slabs if roomy else rng.randint(1, slabs)
    return {
        "tiers": tiers if alone else [cpu, *tiers],
        "store.batch_bytes": rng.randint(1, min(4, in_flight)) * rig.slab_bytes,
        "store.max_in_flight_bytes": in_flight * rig.slab_bytes,
        "store.max_pending_write_bytes": (slabs if roomy else rng.randint(1, slabs)) * rig.slab_bytes,
        "store.allocate_timeout_s": STORE_S / 2 if roomy else rng.choice((0.0, 0.05)),
        "store.timeout_s": STORE_S,
        "retrieve.batch_bytes": rng.randint(1, min(4, in_flight)) * rig.slab_bytes,
        "retrieve.max_in_flight_bytes": in_flight * rig.slab_bytes,
        "retrieve.timeout_s": RETRIEVE_S,
        "retrieve.verify_arena": rng.random() < 0.3,
        "retrieve.promote": rng.random() < 0.8,
        "vllm.lookup_pin_ttl_s": rng.choice((0.05, 30.0)),
        "shutdown_timeout_s": SHUTDOWN_S,
    }
