"""What can be configured: frozen typed records, each field with its meaning and unit."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lmcache_async.config.explain import disagree
from lmcache_async.config.http import HTTPConfig
from lmcache_async.config.secrets import (
    EncryptionConfig,
    SecretFile,
    SecretText,
    check_one_source,
    read_secrets,
)
from lmcache_async.config.sizes import format_size
from lmcache_async.config.specs import Section, TierSpec
from lmcache_async.config.tracing import TracingConfig
from lmcache_async.config.values import (
    Count,
    Flag,
    Names,
    OptionalSize,
    Seconds,
    Size,
    Wait,
    parse_list,
)
from lmcache_async.config.vllm import VLLMConfig
from lmcache_async.errors import ConfigError
from lmcache_async.types import MAX_CHUNK_SIZE

MAX_THREADS = 1024

MIB = 1 << 20
GIB = 1 << 30

DEFAULT_STORE_STAGES = ("hash", "lookup", "allocate", "device_to_host", "seal", "write")
DEFAULT_RETRIEVE_STAGES = ("hash", "plan", "fetch", "verify", "host_to_device")


def _parse_tiers(value: object) -> list[Any]:
    tiers = parse_list(value)
    if not tiers:
        raise ValueError("expected at least one tier")
    return tiers


def _parse_fingerprint(value: object) -> str:
    if not isinstance(value, str) or not (value in {"sampled", "full"} or re.fullmatch(r"text:.+", value)):
        raise ValueError("expected sampled, full or text:<your own name of the weights>")
    return value


def _check_batch(batch_bytes: int, max_in_flight_bytes: int) -> None:
    if batch_bytes > max_in_flight_bytes:
        raise disagree(
            f"a batch of {format_size(batch_bytes)} never fits into"
            f" max_in_flight_bytes of {format_size(max_in_flight_bytes)}",
            "batch_bytes",
            "max_in_flight_bytes",
        )


class ArenaConfig(Section):
    """The host memory that all records in memory and in flight live in."""

    max_bytes: Size = Field(
        default=4 * GIB,
        description="Host memory of the arena in each worker process, in bytes (8GiB, 500MB).",
    )
    huge_pages: Flag = Field(default=True, description="Ask the kernel for huge pages for the arena.")
    prefault: Flag = Field(
        default=True,
        description="Touch the arena's pages in the background at start, so that no store pays for it.",
    )


class GPUConfig(Section):
    """Copies out of device memory and into it, where the cache lies on a GPU."""

    staging_bytes: Size = Field(
        default=64 * MIB,
        description="Device memory for copies, in bytes, for stores and as much again for loads.",
    )
    store_priority: Literal["low", "high"] = Field(
        default="low",
        description="Whether the kernels of stores run before those of the model that wait beside them.",
    )
    load_priority: Literal["low", "high"] = Field(
        default="low", description="The same of loads; lmcache-async bench gpu measures both."
    )


class StoreConfig(Section):
    """From device memory into the tiers."""

    stages: Names = Field(
        default=DEFAULT_STORE_STAGES,
        description="Entry-point names of the stages of the store chain, in order.",
    )
    batch_bytes: Size = Field(
        default=32 * MIB,
        description="Bytes that one batch carries through the chain; at most a quarter of the arena is used.",
    )
    max_in_flight_bytes: Size = Field(
        default=256 * MIB, description="Bytes of all batches in the chain at one time; more wait."
    )
    allocate_timeout_s: Wait = Field(
        default=0.2,
        description="How long a batch of a store waits for arena memory, and for room in a slower tier's queue, before"
        " it is dropped, in seconds; a prompt larger than the arena waits for that room up to timeout_s.",
    )
    max_pending_write_bytes: OptionalSize = Field(
        default=None,
        description="Bytes that slower tiers may have left to write; none means half of the arena.",
    )
    max_pending_write_s: Seconds = Field(
        default=20.0,
        description="Longest time that a slower tier may need for what it has left to write, by the rate of its"
        " writes so far, in seconds; below vLLM's --shutdown-timeout, or a restart loses what is left.",
    )
    timeout_s: Seconds = Field(
        default=30.0,
        description="Longest time until the chunks of one store are with the tiers or dropped, in seconds.",
    )
    partial_chunks: Flag = Field(default=True, description="Store the unfinished last chunk of a prompt too.")
    generated_tokens: Flag = Field(default=True, description="Store the KV of generated tokens too.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_batch(self.batch_bytes, self.max_in_flight_bytes)
        return self


class RetrieveConfig(Section):
    """From the tiers into device memory."""

    stages: Names = Field(
        default=DEFAULT_RETRIEVE_STAGES,
        description="Entry-point names of the stages of the retrieve chain, in order.",
    )
    batch_bytes: Size = Field(default=32 * MIB, description="Bytes that one batch carries through the chain.")
    max_in_flight_bytes: Size = Field(
        default=256 * MIB, description="Bytes of all batches in the chain at one time; more wait."
    )
    timeout_s: Seconds = Field(
        default=10.0,
        description="Longest time of one retrieve, in seconds; what is not there by then is a miss.",
    )
    verify: Flag = Field(
        default=True,
        description="Check the checksums of records; off only to show what the check is for, or to time it.",
    )
    verify_arena: Flag = Field(
        default=False, description="Check the checksum also of records that never left this process's memory."
    )
    promote: Flag = Field(
        default=True, description="Copy chunks found in a slower tier into the faster ones."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_batch(self.batch_bytes, self.max_in_flight_bytes)
        return self


class PluginsConfig(Section):
    """Where tiers and stages may come from."""

    third_party: Flag = Field(
        default=True, description="Use entry points of other distributions than lmcache-async too."
    )


class EngineConfig(Section):
    """The whole configuration of one cache engine. `load_config` makes it; the defaults alone are a working one."""

    chunk_size: Annotated[Count, Field(le=MAX_CHUNK_SIZE)] = Field(
        default=256, description="Tokens in one chunk."
    )
    hash_algorithm: Literal["xxh3_128", "blake3", "sha256"] = Field(
        default="xxh3_128", description="Hash of the chunk keys; blake3 or sha256 where tenants are hostile."
    )
    hash_key_file: SecretFile = Field(
        default=None,
        description="File of a secret of 32 bytes, in hex or base64, that keys the hash (blake3 or sha256).",
    )
    hash_key: SecretText = Field(
        default=None, description="That secret itself; as the variable LMCACHE_ASYNC_HASH_KEY only."
    )
    weights_fingerprint: Annotated[str, BeforeValidator(_parse_fingerprint)] = Field(
        default="sampled",
        description="How the model's weights are told apart: sampled, full (reads every byte) or text:<your own>.",
    )
    copy_threads: Annotated[Count, Field(le=MAX_THREADS)] = Field(
        default=2, description="Threads for copies and checksums in each worker process."
    )
    shutdown_timeout_s: Wait = Field(
        default=25.0,
        description="How long closing waits for pending writes before it drops them, in seconds; at least"
        " store.max_pending_write_s, or a slow tier loses some, and below vLLM's --shutdown-timeout.",
    )
    arena: ArenaConfig = Field(default_factory=ArenaConfig, description="Host memory.")
    gpu: GPUConfig = Field(default_factory=GPUConfig, description="Copies out of a GPU and into it.")
    tiers: Annotated[tuple[TierSpec, ...], BeforeValidator(_parse_tiers)] = Field(
        default_factory=lambda: (TierSpec.model_validate("cpu"),), description="The tiers, fastest first."
    )
    store: StoreConfig = Field(default_factory=StoreConfig, description="From device memory into the tiers.")
    retrieve: RetrieveConfig = Field(
        default_factory=RetrieveConfig, description="From the tiers into device memory."
    )
    encryption: EncryptionConfig = Field(
        default_factory=EncryptionConfig, description="Encryption of what leaves the process's memory."
    )
    tracing: TracingConfig = Field(
        default_factory=TracingConfig, description="Spans of stores and retrieves, for OpenTelemetry."
    )
    http: HTTPConfig = Field(
        default_factory=HTTPConfig, description="The status page and metrics; not served by default."
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="What only the vLLM connector uses.")
    plugins: PluginsConfig = Field(
        default_factory=PluginsConfig, description="Where tiers and stages may come from."
    )

    @property
    def max_pending_write_bytes(self) -> int:
        """Bytes that slower tiers may have left to write: as configured, or half of the arena."""
        configured = self.store.max_pending_write_bytes
        return max(1, self.arena.max_bytes // 2) if configured is None else configured

    def read_hash_key(self) -> bytes:
        """The secret of the keyed hash; b"" where there is none.

        Raises:
            ConfigError: The file cannot be used, or holds something else than one key.
        """
        keys = read_secrets(self.hash_key, self.hash_key_file, "hash_key", "hash_key_file")
        if len(keys) > 1:
            name = "hash_key_file" if self.hash_key is None else "hash_key"
            raise ConfigError(f"{name}: there are {len(keys)} keys; a hash has one")
        return keys[0] if keys else b""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        check_one_source(self.hash_key, self.hash_key_file, "hash_key", "hash_key_file")
        if self.hash_algorithm == "xxh3_128" and (self.hash_key or self.hash_key_file):
            raise disagree(
                "xxh3_128 takes no hash key; set hash_algorithm to blake3 or sha256",
                "hash_algorithm",
                "hash_key_file",
                "hash_key",
            )
        seen: dict[str, int] = {}
        for index, tier in enumerate(self.tiers):
            if (first := seen.setdefault(tier.id, index)) != index:
                raise disagree(
                    f"tiers[{first}] and tiers[{index}] both have the id {tier.id!r}; give one of them another `id`",
                    f"tiers.{index}.id",
                )
        pending = self.store.max_pending_write_bytes
        if pending is not None and pending > self.arena.max_bytes:
            raise disagree(
                f"{format_size(pending)} of pending writes never fit into"
                f" arena.max_bytes of {format_size(self.arena.max_bytes)}",
                "store.max_pending_write_bytes",
                "arena.max_bytes",
            )
        return self
