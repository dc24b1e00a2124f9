"""The configuration of an engine: frozen models with a description and a unit of each field."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from lmcache_async.config.secrets import (
    EncryptionConfig,
    SecretFile,
    SecretText,
    check_one_source,
    read_secrets,
)
from lmcache_async.config.validation import Origin, disagree
from lmcache_async.config.values import (
    Count,
    Endpoint,
    Flag,
    Fraction,
    Name,
    Names,
    OptionalFile,
    OptionalRate,
    OptionalSize,
    Seconds,
    Size,
    Wait,
    format_size,
    is_loopback,
    parse_list,
    parse_listen,
    parse_mapping,
    unless_none,
)
from lmcache_async.errors import ConfigError
from lmcache_async.types import MAX_CHUNK_SIZE

MAX_THREADS = 1024

MIB = 1 << 20
GIB = 1 << 30

DEFAULT_STORE_STAGES = ("hash", "lookup", "allocate", "device_to_host", "seal", "write")
DEFAULT_RETRIEVE_STAGES = ("hash", "plan", "fetch", "verify", "host_to_device")


class Section(BaseModel):
    """A frozen section of the configuration. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginSpec(Section):
    """A plug-in by the name of its entry point. Keys that are not fields are options of the plug-in.

    Options are not in the repr, because there may be a password among them.
    """

    kind: ClassVar[str] = "plug-in"

    name: Name = Field(
        description="Name of the entry point, such as cpu or disk for a tier, retry or breaker for a layer."
    )
    id: Name = Field(
        default="", description="Unique name in reports; by default the name of the entry point."
    )
    options: Annotated[Mapping[str, Any], BeforeValidator(parse_mapping)] = Field(
        default_factory=dict, repr=False, description="Options of the plug-in, validated by its config type."
    )

    _origin: Origin | None = PrivateAttr(default=None)

    @property
    def origin(self) -> Origin:
        """The place of the plug-in in the configuration, with the lines of its options."""
        return self._origin or Origin(f"{self.kind} {self.id}")

    @property
    def where(self) -> str:
        """The place of the plug-in, as text for messages."""
        return self.origin.at(())

    def placed(self, origin: Origin) -> Self:
        """Return a copy with another origin."""
        spec = self.model_copy()
        spec._origin = origin
        return spec

    def __eq__(self, other: object) -> bool:
        """Compare name and options, but not the origin."""
        return isinstance(other, type(self)) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # the options are a dict

    @model_validator(mode="before")
    @classmethod
    def _from_name_or_flat(cls, value: object) -> object:
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(  # noqa: TRY004 - pydantic reads ValueError
                f"expected a {cls.kind}'s name, or a mapping with `name` and the {cls.kind}'s options"
            )
        fields = {key: item for key, item in value.items() if key in cls.model_fields}
        rest = {str(key): item for key, item in value.items() if key not in cls.model_fields}
        if isinstance(name := fields.get("name"), str):
            fields.setdefault("id", name)
        if rest:
            options = parse_mapping(fields.get("options", {}))
            if twice := sorted(options.keys() & rest.keys()):
                raise disagree("it is given twice, beside `options` and inside it", twice[0])
            fields["options"] = options | rest
        return fields


class LayerSpec(PluginSpec):
    """A layer around a tier."""

    kind: ClassVar[str] = "layer"


class TierSpec(PluginSpec):
    """A tier by the name of its entry point. Keys that are not fields are options of the tier."""

    kind: ClassVar[str] = "tier"

    timeout_s: Seconds = Field(default=30.0, description="Longest time of one call to the tier, in seconds.")
    open_timeout_s: Seconds = Field(
        default=60.0, description="Longest time to open the tier at start-up, in seconds."
    )
    layers: Annotated[
        Annotated[tuple[LayerSpec, ...], BeforeValidator(parse_list)] | None, BeforeValidator(unless_none)
    ] = Field(
        default=None,
        description="Layers around the tier, outermost first; none for the default layers, an empty list for no layer.",
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers or ()):
            if (first := seen.setdefault(layer.id, index)) != index:
                raise disagree(
                    f"layers[{first}] and layers[{index}] both have the id {layer.id!r};"
                    " give one of them another `id`",
                    f"layers.{index}.id",
                )
        return self


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
    """Host memory for records in memory and in flight."""

    max_bytes: Size = Field(
        default=4 * GIB,
        description="Host memory of the arena in each worker process, in bytes (8GiB, 500MB).",
    )
    huge_pages: Flag = Field(default=True, description="Ask the kernel for huge pages for the arena.")
    prefault: Flag = Field(
        default=True,
        description="Map the pages of the arena in the background at start, so that no store has to.",
    )


class GPUConfig(Section):
    """Copies between a GPU and host memory."""

    staging_bytes: Size = Field(
        default=64 * MIB,
        description="Device memory for copies, in bytes, for stores and loads each.",
    )
    store_priority: Literal["low", "high"] = Field(
        default="low",
        description="Priority of the CUDA streams of stores; high runs their kernels before waiting ones of the model.",
    )
    load_priority: Literal["low", "high"] = Field(
        default="low",
        description="Priority of the CUDA streams of loads; python -m tools.benchmarks gpu measures both.",
    )


class StoreConfig(Section):
    """Stores, from device memory to the tiers."""

    stages: Names = Field(
        default=DEFAULT_STORE_STAGES,
        description="Names of the stages of the store chain, in order.",
    )
    batch_bytes: Size = Field(
        default=32 * MIB,
        description="Bytes of one batch; at most a quarter of the arena is used.",
    )
    max_in_flight_bytes: Size = Field(
        default=256 * MIB, description="Bytes of all batches in the chain at one time; more wait."
    )
    allocate_timeout_s: Wait = Field(
        default=0.2,
        description="Longest wait of a batch for arena memory and for room in the queue of a slower tier before it is"
        " dropped, in seconds; a prompt larger than the arena waits for the queue up to timeout_s.",
    )
    max_pending_write_bytes: OptionalSize = Field(
        default=None,
        description="Maximum bytes in the write queue of a slower tier; none for half of the arena.",
    )
    max_pending_write_s: Seconds = Field(
        default=20.0,
        description="Maximum length of the write queue of a slower tier, in seconds at its measured write rate. Must be"
        " below vLLM's --shutdown-timeout, or a restart loses queued writes.",
    )
    timeout_s: Seconds = Field(
        default=30.0,
        description="Longest time until all chunks of a store are stored or dropped, in seconds.",
    )
    partial_chunks: Flag = Field(
        default=True, description="Also store the incomplete last chunk of a prompt."
    )
    generated_tokens: Flag = Field(default=True, description="Also store the KV cache of generated tokens.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_batch(self.batch_bytes, self.max_in_flight_bytes)
        return self


class RetrieveConfig(Section):
    """Retrieves, from the tiers to device memory."""

    stages: Names = Field(
        default=DEFAULT_RETRIEVE_STAGES,
        description="Names of the stages of the retrieve chain, in order.",
    )
    batch_bytes: Size = Field(default=32 * MIB, description="Bytes of one batch.")
    max_in_flight_bytes: Size = Field(
        default=256 * MIB, description="Bytes of all batches in the chain at one time; more wait."
    )
    timeout_s: Seconds = Field(
        default=10.0,
        description="Longest time of a retrieve, in seconds; chunks that are not loaded by then are misses.",
    )
    verify: Flag = Field(
        default=True,
        description="Verify the checksums of records; disable it only to measure its cost.",
    )
    verify_arena: Flag = Field(
        default=False,
        description="Also verify the checksums of records that never left the process's memory.",
    )
    promote: Flag = Field(
        default=True, description="Copy chunks found in a slower tier into the faster ones."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_batch(self.batch_bytes, self.max_in_flight_bytes)
        return self


class PluginsConfig(Section):
    """Allowed sources of tiers and stages."""

    third_party: Flag = Field(
        default=True, description="Also use entry points of other distributions than lmcache-async."
    )


class TracingConfig(Section):
    """OpenTelemetry spans of stores and retrieves; see docs/metrics.md."""

    enabled: Flag = Field(
        default=False,
        description="Create OpenTelemetry spans of stores and retrieves; requires the extra otel.",
    )


def _parse_listen(value: object) -> Endpoint:
    return value if isinstance(value, Endpoint) else parse_listen(value)


class HTTPConfig(Section):
    """The read-only server of the status page, its data as JSON, and Prometheus metrics."""

    listen: Annotated[
        Annotated[Endpoint, BeforeValidator(_parse_listen)] | None,
        BeforeValidator(unless_none, json_schema_input_type=str | None),
    ] = Field(
        default=None,
        description="Address of the status page and the metrics, as host:port. The rank is added to the port; port 0"
        " takes a free one; none disables the server.",
    )
    token_file: OptionalFile = Field(
        default=None,
        description="File of the accepted access tokens, one per line, not readable by others; required unless the"
        " address is a loopback.",
    )
    tls_cert_file: OptionalFile = Field(
        default=None, description="PEM file of the certificate for HTTPS; none for HTTP."
    )
    tls_key_file: OptionalFile = Field(
        default=None, description="PEM file of the key, if it is not in tls_cert_file."
    )
    max_connections: Count = Field(
        default=32, description="Maximum number of connections; further ones are refused."
    )
    timeout_s: Seconds = Field(
        default=10.0, description="Longest time of one connection with its single request, in seconds."
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.listen is not None and self.token_file is None and not is_loopback(self.listen.host):
            raise disagree(
                f"{self.listen} is reachable from other machines without a token:"
                " set token_file, or listen at 127.0.0.1",
                "listen",
                "token_file",
            )
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise disagree("tls_key_file requires tls_cert_file", "tls_key_file", "tls_cert_file")
        return self

    def make_context(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without a certificate.

        Raises:
            ConfigError: A file cannot be used.
        """
        if self.tls_cert_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        except (OSError, ssl.SSLError) as error:
            names = f"http.tls_cert_file: {self.tls_cert_file}, http.tls_key_file: {self.tls_key_file}"
            raise ConfigError(f"{names}: they cannot be used: {error}") from error
        return context


def _parse_directory(value: object) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError("expected the path of a directory")  # noqa: TRY004 - pydantic reads ValueError
    return Path(value)


class VLLMConfig(Section):
    """Settings of the vLLM connector."""

    lookup_timeout_s: Seconds = Field(
        default=0.5,
        description="Longest wait of a request for its lookup before it counts as a miss, in seconds.",
    )
    lookup_pin_ttl_s: Seconds = Field(
        default=30.0,
        description="Time for which chunks found by a lookup stay pinned without a retrieve, in seconds.",
    )
    max_pinned_fraction: Fraction = Field(
        default=0.25,
        description="Largest fraction of the arena that lookups may pin, and of vLLM's blocks that stores may hold until"
        " they are copied; above 0 and at most 1.",
    )
    layerwise_load: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether hits in host memory are loaded during the step that uses them, layer by layer; auto does so"
        " if the model runs on a CPU.",
    )
    layerwise_max_tokens: Count = Field(
        default=16384,
        description="Longest hit that is loaded layer by layer, because the whole batch waits for it; longer ones are"
        " loaded before the request joins a batch.",
    )
    load_policy: Literal["auto", "always"] = Field(
        default="auto",
        description="auto loads the part of a hit that is loaded faster than computed, by measured times; always loads all.",
    )
    prefill_tokens_per_s: OptionalRate = Field(
        default=None,
        description="Prefill speed in tokens per second for load_policy; none for measured.",
    )
    wait_for_producer_s: Wait = Field(
        default=2.0,
        description="Longest wait of a request for chunks that another vLLM has promised to store, in seconds; 0 for no"
        " wait.",
    )
    producer_loads: Flag = Field(
        default=True, description="Whether a vLLM with kv_role kv_producer loads hits, as with kv_both."
    )
    consumer_stores: Flag = Field(
        default=False, description="Whether a vLLM with kv_role kv_consumer stores computed chunks."
    )
    socket_dir: Annotated[
        Annotated[Path, BeforeValidator(_parse_directory)] | None, BeforeValidator(unless_none)
    ] = Field(
        default=None,
        description="Directory of the sockets between scheduler and workers; none for a private temporary one.",
    )
    reset_cache: Literal["all", "memory"] = Field(
        default="all",
        description="Tiers that are cleared when vLLM resets its prefix cache: all, or memory only.",
    )


class EngineConfig(Section):
    """Configuration of a cache engine, made by `load_config`. The defaults are a working configuration."""

    chunk_size: Annotated[Count, Field(le=MAX_CHUNK_SIZE)] = Field(
        default=256, description="Tokens per chunk."
    )
    hash_algorithm: Literal["xxh3_128", "blake3", "sha256"] = Field(
        default="xxh3_128", description="Hash of the chunk keys; blake3 or sha256 if tenants may be hostile."
    )
    hash_key_file: SecretFile = Field(
        default=None,
        description="File of a secret of 32 bytes, in hex or base64, as the key of the hash (blake3 or sha256).",
    )
    hash_key: SecretText = Field(
        default=None, description="The secret itself; only as the variable LMCACHE_ASYNC_HASH_KEY."
    )
    weights_fingerprint: Annotated[str, BeforeValidator(_parse_fingerprint)] = Field(
        default="sampled",
        description="Fingerprint of the model's weights: sampled, full (reads every byte) or text:<your own>.",
    )
    copy_threads: Annotated[Count, Field(le=MAX_THREADS)] = Field(
        default=2, description="Threads for copies and checksums in each worker process."
    )
    shutdown_timeout_s: Wait = Field(
        default=25.0,
        description="Longest wait for queued writes when the engine closes, in seconds; the rest is dropped. At least"
        " store.max_pending_write_s, and less than vLLM's --shutdown-timeout.",
    )
    arena: ArenaConfig = Field(default_factory=ArenaConfig, description="Host memory.")
    gpu: GPUConfig = Field(default_factory=GPUConfig, description="Copies between a GPU and host memory.")
    tiers: Annotated[tuple[TierSpec, ...], BeforeValidator(_parse_tiers)] = Field(
        default_factory=lambda: (TierSpec.model_validate("cpu"),), description="The tiers, fastest first."
    )
    store: StoreConfig = Field(
        default_factory=StoreConfig, description="Stores, from device memory to the tiers."
    )
    retrieve: RetrieveConfig = Field(
        default_factory=RetrieveConfig, description="Retrieves, from the tiers to device memory."
    )
    encryption: EncryptionConfig = Field(
        default_factory=EncryptionConfig, description="Encryption of records outside of the process's memory."
    )
    tracing: TracingConfig = Field(default_factory=TracingConfig, description="OpenTelemetry spans.")
    http: HTTPConfig = Field(
        default_factory=HTTPConfig, description="The status page and metrics; disabled by default."
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="Settings of the vLLM connector.")
    plugins: PluginsConfig = Field(
        default_factory=PluginsConfig, description="Allowed sources of tiers and stages."
    )

    @property
    def max_pending_write_bytes(self) -> int:
        """Maximum bytes in the write queue of a slower tier; half of the arena by default."""
        configured = self.store.max_pending_write_bytes
        return max(1, self.arena.max_bytes // 2) if configured is None else configured

    def read_hash_key(self) -> bytes:
        """Return the secret of the keyed hash; b"" if there is none.

        Raises:
            ConfigError: The file cannot be used, or does not contain exactly one key.
        """
        keys = read_secrets(self.hash_key, self.hash_key_file, "hash_key", "hash_key_file")
        if len(keys) > 1:
            name = "hash_key_file" if self.hash_key is None else "hash_key"
            raise ConfigError(f"{name}: expected one key, found {len(keys)}")
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
