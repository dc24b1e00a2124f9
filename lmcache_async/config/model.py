"""The configuration of an engine: frozen models with a description and a unit of each field."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lmcache_async.config.files import load_certificate
from lmcache_async.config.secrets import SecretText, check_one_source, read_secrets
from lmcache_async.config.validation import Origin, disagree
from lmcache_async.config.values import (
    Count,
    Endpoint,
    Flag,
    Fraction,
    Name,
    Names,
    OptionalCount,
    OptionalPath,
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
    parse_name,
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
    """A frozen section of the configuration. Unknown keys are errors. Descriptions are the fields' docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PluginSpec(Section):
    """A plug-in by the name of its entry point. Keys that are not fields are options of the plug-in."""

    kind: ClassVar[str] = "plug-in"

    name: Name
    """Name of the entry point, such as cpu or disk for a tier, retry or breaker for a layer."""
    id: Name = ""
    """Unique name in reports; by default the name of the entry point."""
    # Not in the repr, because there may be a password among them.
    options: Annotated[Mapping[str, Any], BeforeValidator(parse_mapping)] = Field(
        default_factory=dict, repr=False
    )
    """Options of the plug-in, validated by its config type."""

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
        if not isinstance(value, Mapping) or "name" not in value:
            raise ValueError(
                f"expected a {cls.kind}'s name, or a mapping with `name` and the {cls.kind}'s options"
            )
        fields = {key: item for key, item in value.items() if key in cls.model_fields}
        rest = {str(key): item for key, item in value.items() if key not in cls.model_fields}
        with contextlib.suppress(ValueError):  # the field reports a wrong name
            fields.setdefault("id", parse_name(fields["name"]))
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

    timeout_s: Seconds = 30.0
    """Longest time of one call to the tier, in seconds."""
    open_timeout_s: Seconds = 60.0
    """Longest time to open the tier at start-up, in seconds."""
    layers: Annotated[
        Annotated[tuple[LayerSpec, ...], BeforeValidator(parse_list)] | None, BeforeValidator(unless_none)
    ] = None
    """Layers around the tier, outermost first; none for the default layers, an empty list for no
    layer."""


def _parse_tiers(value: object) -> list[Any]:
    tiers = parse_list(value)
    if not tiers:
        raise ValueError("expected at least one tier")
    return tiers


def _parse_fingerprint(value: object) -> str:
    if not isinstance(value, str) or not (value in {"sampled", "full"} or re.fullmatch(r"text:.+", value)):
        raise ValueError("expected sampled, full or text:<your own name of the weights>")
    return value


class EncryptionConfig(Section):
    """Encryption of records in tiers outside of the process's memory."""

    key_file: OptionalPath = None
    """File of the keys, one per line, each 32 bytes in hex or base64. Records are encrypted with the first key and
    decrypted with any of them."""
    keys: SecretText = None
    """The same keys, separated by spaces or commas; accepted only from the variable LMCACHE_ASYNC_ENCRYPTION__KEYS."""

    @property
    def enabled(self) -> bool:
        return self.key_file is not None or self.keys is not None

    def read_keys(self) -> tuple[bytes, ...]:
        """Return the keys, the one for encryption first; none if encryption is disabled.

        Raises:
            ConfigError: The file cannot be read, is readable by others, or contains anything but keys.
        """
        return read_secrets(self.keys, self.key_file, "encryption.keys", "encryption.key_file")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        check_one_source(self.keys, self.key_file, "keys", "key_file")
        return self


class ArenaConfig(Section):
    """Host memory for records kept in memory and records in flight."""

    max_bytes: Size = 4 * GIB
    """Host memory of the arena in each worker process, in bytes (8GiB, 500MB)."""
    huge_pages: Flag = True
    """Request huge pages from the kernel for the arena and, on a CPU, for the KV cache."""
    prefault: Flag = True
    """Map the pages of the arena in the background at start, so that stores do not wait for it."""


class GPUConfig(Section):
    """Copies between a GPU and host memory."""

    staging_bytes: Size = 128 * MIB
    """Device memory for the staging of copies in bytes, separately for stores and for loads."""
    store_priority: Literal["low", "high"] = "low"
    """Priority of the CUDA streams of stores; high runs their kernels before waiting kernels
    of the model."""
    load_priority: Literal["low", "high"] = "low"
    """Priority of the CUDA streams of loads; python -m tools.benchmarks gpu measures both."""


class ChainConfig(Section):
    """Stages of a chain, and limits of its batches."""

    stages: Names
    """Names of the stages of the chain, in order."""
    batch_bytes: Size = 32 * MIB
    """Size of one batch in bytes; limited to a quarter of the arena."""
    max_in_flight_bytes: Size = 256 * MIB
    """Maximum bytes of all batches in the chain at the same time; further batches wait."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.batch_bytes > self.max_in_flight_bytes:
            raise disagree(
                f"a batch of {format_size(self.batch_bytes)} never fits into"
                f" max_in_flight_bytes of {format_size(self.max_in_flight_bytes)}",
                "batch_bytes",
                "max_in_flight_bytes",
            )
        return self


class StoreConfig(ChainConfig):
    """Stores, from device memory to the tiers."""

    stages: Names = DEFAULT_STORE_STAGES
    """Names of the stages of the store chain, in order."""
    allocate_timeout_s: Wait = 0.2
    """Longest wait of a batch for arena memory and for room in the queue of a slower tier before it is
    dropped, in seconds; a prompt larger than the arena waits for the queue up to timeout_s."""
    max_pending_write_bytes: OptionalSize = None
    """Maximum bytes in the write queue of a slower tier; none for half of the arena."""
    max_pending_write_s: Seconds = 20.0
    """Maximum length of the write queue of a slower tier, in seconds at its measured write rate. Must be
    below vLLM's --shutdown-timeout, or a restart loses queued writes."""
    timeout_s: Seconds = 30.0
    """Longest time until all chunks of a store are stored or dropped, in seconds. Lookups may take half of it."""
    partial_chunks: Flag = True
    """Also store the incomplete last chunk of a prompt."""
    generated_tokens: Flag = True
    """Also store the KV cache of generated tokens."""


class RetrieveConfig(ChainConfig):
    """Retrieves, from the tiers to device memory."""

    stages: Names = DEFAULT_RETRIEVE_STAGES
    """Names of the stages of the retrieve chain, in order."""
    timeout_s: Seconds = 10.0
    """Longest time of a retrieve, in seconds; chunks that are not loaded by then are misses. Lookups may take half of it."""
    verify: Flag = True
    """Verify the checksums of records; disable it only to measure its cost."""
    verify_arena: Flag = False
    """Also verify the checksums of records that never left the process's memory."""
    promote: Flag = True
    """Copy chunks found in a slower tier into the faster ones."""

    @property
    def allocate_timeout_s(self) -> float:
        """Longest wait of a chunk for arena memory, in seconds. Afterwards, the chunks before it are loaded."""
        return self.timeout_s / 2


class PluginsConfig(Section):
    """Allowed sources of tiers, layers and stages."""

    third_party: Flag = True
    """Also use entry points of distributions other than lmcache-async."""


class TracingConfig(Section):
    """OpenTelemetry spans of stores and retrieves; see docs/metrics.md."""

    enabled: Flag = False
    """Create OpenTelemetry spans of stores and retrieves; requires the extra otel."""


class HTTPConfig(Section):
    """The read-only server of the status page, its data as JSON, and Prometheus metrics."""

    listen: Annotated[
        Annotated[Endpoint, BeforeValidator(parse_listen)] | None,
        BeforeValidator(unless_none, json_schema_input_type=str | None),
    ] = None
    """Address of the status page and the metrics, as host:port. The rank is added to the port; port 0
    selects a free port; none disables the server."""
    token_file: OptionalPath = None
    """File of the accepted access tokens, one per line, not readable by others; required unless the
    address is a loopback."""
    tls_cert_file: OptionalPath = None
    """PEM file of the certificate for HTTPS; none for HTTP."""
    tls_key_file: OptionalPath = None
    """PEM file of the key, if it is not in tls_cert_file."""
    max_connections: Count = 32
    """Maximum number of connections; further ones are refused."""
    timeout_s: Seconds = 10.0
    """Longest time of one connection with its single request, in seconds."""

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
            load_certificate(context, self.tls_cert_file, self.tls_key_file)
        except OSError as error:
            names = f"http.tls_cert_file: {self.tls_cert_file}, http.tls_key_file: {self.tls_key_file}"
            raise ConfigError(f"{names}: they cannot be used: {error}") from error
        return context


class VLLMConfig(Section):
    """Settings of the vLLM connector."""

    lookup_timeout_s: Seconds = 0.5
    """Longest wait of a request for its lookup before it counts as a miss, in seconds."""
    lookup_pin_ttl_s: Seconds = 30.0
    """Time for which chunks found by a lookup stay pinned without a retrieve, in seconds."""
    max_pinned_fraction: Fraction = 0.25
    """Largest fraction of the arena that lookups may pin, and of vLLM's blocks that stores may hold until
    they are copied; above 0 and at most 1."""
    layerwise_load: Literal["auto", "always", "never"] = "auto"
    """Whether the model's thread waits for loads from host memory. never: it does not. auto and always: it waits for
    at most 0.1 s if nothing else is computed. With one KV group and without asynchronous scheduling, the hit is instead
    loaded layer by layer in the step that uses it: with auto on a CPU, with always on every device."""
    layerwise_max_tokens: Count = 16384
    """Longest hit in tokens that the model's thread waits for. Longer hits are loaded while other steps run, before
    the request joins a batch."""
    load_policy: Literal["auto", "always"] = "auto"
    """auto loads only the part of a hit that loads faster than it is computed, by measured times; always loads
    the whole hit."""
    prefill_tokens_per_s: OptionalRate = None
    """Prefill speed in tokens per second for load_policy; none to measure it."""
    wait_for_producer_s: Wait = 2.0
    """Longest wait of a request for chunks that another vLLM instance has promised to store, in seconds; 0 for no
    wait."""
    producer_loads: Flag = True
    """Whether a vLLM instance with kv_role kv_producer loads hits, as with kv_both."""
    consumer_stores: Flag = False
    """Whether a vLLM instance with kv_role kv_consumer stores computed chunks."""
    kv_head_shards: OptionalCount = None
    """Number of shards of the KV heads over all tensor-parallel ranks, each stored as a separate record. Servers with the
    same number use each other's records, whatever their tensor-parallel size. It must be a multiple of the
    tensor-parallel size and divide the number of KV heads; none for one record per rank."""
    lookup_transport: Literal["auto", "unix", "tcp"] = "auto"
    """How the scheduler reaches its workers for lookups: Unix sockets, or TCP for workers on other hosts; auto
    selects tcp if vLLM runs on several nodes or with Ray."""
    socket_dir: OptionalPath = None
    """Directory of the sockets between scheduler and workers; none for $XDG_RUNTIME_DIR or the directory for temporary
    files. The sockets are in its private subdirectory lmcache-async-UID."""
    reset_cache: Literal["all", "memory", "new_namespace"] = "all"
    """Tiers that are cleared when vLLM resets its prefix cache: all, or memory only. new_namespace clears memory and
    uses another namespace from then on: other tiers keep their records, but this process does not find them."""


class EngineConfig(Section):
    """Configuration of a cache engine, made by `load_config`. The defaults are a working configuration.

    Each section is described by the docstring of its class.
    """

    chunk_size: Annotated[Count, Field(le=MAX_CHUNK_SIZE)] = 256
    """Tokens per chunk."""
    hash_algorithm: Literal["xxh3_128", "blake3", "sha256"] = "xxh3_128"
    """Hash of the chunk keys; blake3 or sha256 if tenants may be hostile."""
    hash_key_file: OptionalPath = None
    """File with the secret key of the hash, 32 bytes in hex or base64; requires blake3 or sha256."""
    hash_key: SecretText = None
    """The same key; accepted only from the variable LMCACHE_ASYNC_HASH_KEY."""
    weights_fingerprint: Annotated[str, BeforeValidator(_parse_fingerprint)] = "sampled"
    """Fingerprint of the model's weights: sampled, full (reads every byte), or text:<name> with a name that you choose."""
    copy_threads: Annotated[Count, Field(le=MAX_THREADS)] = 2
    """Threads of each worker process for checksums and layer-wise loads, and as many others for other copies."""
    shutdown_timeout_s: Wait = 25.0
    """Longest wait for queued writes when the engine closes, in seconds; the rest is dropped. At least
    store.max_pending_write_s, and less than vLLM's --shutdown-timeout."""
    arena: ArenaConfig = ArenaConfig()
    gpu: GPUConfig = GPUConfig()
    tiers: Annotated[tuple[TierSpec, ...], BeforeValidator(_parse_tiers)] = Field(
        default_factory=lambda: (TierSpec.model_validate("cpu"),)
    )
    """The tiers, fastest first."""
    store: StoreConfig = StoreConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    encryption: EncryptionConfig = EncryptionConfig()
    tracing: TracingConfig = TracingConfig()
    http: HTTPConfig = HTTPConfig()
    vllm: VLLMConfig = VLLMConfig()
    plugins: PluginsConfig = PluginsConfig()

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
    def _agrees(self, info: ValidationInfo) -> Self:
        for contradiction in self._contradictions():
            if info.context is None:  # otherwise `validate_all` passed a list to collect them
                raise contradiction
            info.context.append(contradiction)
        return self

    def _contradictions(self) -> Iterator[PydanticCustomError]:
        check_one_source(self.hash_key, self.hash_key_file, "hash_key", "hash_key_file")
        if self.hash_algorithm == "xxh3_128" and (self.hash_key or self.hash_key_file):
            yield disagree(
                "xxh3_128 takes no hash key; set hash_algorithm to blake3 or sha256",
                "hash_algorithm",
                "hash_key_file",
                "hash_key",
            )
        yield from _same_ids("tiers", "tiers", self.tiers)
        for index, tier in enumerate(self.tiers):
            yield from _same_ids("layers", f"tiers.{index}.layers", tier.layers or ())
        pending = self.store.max_pending_write_bytes
        if pending is not None and pending > self.arena.max_bytes:
            yield disagree(
                f"{format_size(pending)} of pending writes never fit into"
                f" arena.max_bytes of {format_size(self.arena.max_bytes)}",
                "store.max_pending_write_bytes",
                "arena.max_bytes",
            )


def _same_ids(name: str, path: str, specs: Sequence[PluginSpec]) -> Iterator[PydanticCustomError]:
    seen: dict[str, int] = {}
    for index, spec in enumerate(specs):
        if (first := seen.setdefault(spec.id, index)) != index:
            yield disagree(
                f"{name}[{first}] and {name}[{index}] both have the id {spec.id!r}; give one of them another `id`",
                f"{path}.{index}.id",
            )
