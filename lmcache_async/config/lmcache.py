"""LMCache's settings, read from its file and its variables.

Settings with an equivalent here are converted. Settings without one are reported with the reason, unless their
value matches the behaviour here. Settings that LMCache does not have are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from lmcache_async.config.model import EngineConfig
from lmcache_async.config.sources import CONFIG_FILE, PREFIX, Precedence, Setting, is_service_link
from lmcache_async.config.validation import Origin, hint, nearest, show
from lmcache_async.config.values import (
    MAX_BYTES,
    MAX_SECONDS,
    number_parser,
    parse_count,
    parse_flag,
    parse_mapping,
    parse_seconds,
    unless_none,
)
from lmcache_async.errors import ConfigError

VARIABLE_PREFIX = "LMCACHE_"
EXTRA_PREFIX = "lmcache."
_OFF = frozenset({"", "none", "null", "false", "no", "off", "0", "0.0", "[]", "{}"})


_parse_gibibytes = number_parser("a number of GiB above 0", lambda gibibytes: gibibytes * 1024**3 >= 1)
_parse_milliseconds = number_parser(
    "a number of milliseconds above 0", lambda number: 0 < number <= MAX_SECONDS
)


def _gibibytes(value: object) -> int:
    """Parse a number of GB, which are GiB in LMCache, to bytes."""
    size = _parse_gibibytes(value) * 1024**3
    if size > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES >> 30} GiB")
    return int(size)


def _milliseconds(value: object) -> float:
    return _parse_milliseconds(value) / 1000


SUPPORTED: dict[str, tuple[str, Callable[[object], Any] | None]] = {
    "chunk_size": ("chunk_size", parse_count),
    "max_local_cpu_size": ("arena.max_bytes", _gibibytes),
    "local_cpu_use_hugepages": ("arena.huge_pages", parse_flag),
    "save_decode_cache": ("store.generated_tokens", parse_flag),
    "save_unfull_chunk": ("store.partial_chunks", parse_flag),
    "discard_partial_chunks": ("store.partial_chunks", lambda value: not parse_flag(value)),
    "blocking_timeout_secs": ("retrieve.timeout_s", parse_seconds),
    "lookup_timeout_ms": ("vllm.lookup_timeout_s", _milliseconds),
    "pin_timeout_sec": ("vllm.lookup_pin_ttl_s", parse_seconds),
    "local_cpu": ("tiers", None),
    "local_disk": ("tiers", None),
    "max_local_disk_size": ("tiers", None),
    "remote_url": ("tiers", None),
}
"""Key here for each setting of LMCache, and the parser of its value; None for settings that `_tiers` converts together."""

ALIASES = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
    "peer_init_ports": "p2p_init_ports",
    "peer_lookup_ports": "p2p_lookup_ports",
    "blend_recompute_ratio": "blend_recompute_ratios",
}
"""Older names of settings that LMCache still accepts, and their current names."""

REMOTE_TIERS = {
    "redis": "valkey",
    "rediss": "valkey",
    "unix": "valkey",
    "redis-sentinel": "valkey",
    "valkey": "valkey",
    "s3": "s3",
    "mooncakestore": "mooncake",
}
"""Tier for the scheme of a `remote_url`, unless a tier with the name of the scheme is installed."""

CONNECTOR_KEYS = frozenset({"discard_partial_chunks", "lmcache_rpc_port", "skip_last_n_tokens", "use_native"})
"""Settings of LMCache's connector in kv_connector_extra_config without the prefix `lmcache.`."""

DEFAULTS = {
    "remote_serde": "naive",
    "pre_caching_hash_algorithm": "builtin",
    "cache_policy": "lru",
    "py_enable_gc": "true",
    "transfer_channel": "",
    "track_usage": "false",
    "use_experimental": "true",
}
"""Values of unsupported settings that match the behaviour here. Settings not listed match if off, 0, none or empty."""

_HIDDEN = "this version stores KV only, no hidden states"
_PROCESS = "use the tier host with lmcache-async serve, see docs/tiers/host.md"
_LAYERS = "all layers of a chunk are moved together, in batches of store.batch_bytes"

_KEYS_BY_REASON = {
    "records are stored unchanged; add an encoding stage to store.stages": "remote_serde",
    "keys are computed with hash_algorithm and do not depend on PYTHONHASHSEED": "pre_caching_hash_algorithm",
    "each tier evicts by its own policy": "cache_policy cost_aware_half_life_seconds cost_aware_ewma_alpha",
    "the size of the arena is arena.max_bytes": "reserve_local_cpu_size",
    "a disk tier has one path; configure several under tiers": "local_disk_path_sharding",
    "layer-wise loading is automatic, see vllm.layerwise_load": "use_layerwise",
    _LAYERS: "use_gpu_connector_v3 experimental_sampled_layerwise_lookup",
    "this version reuses prefixes only and does not blend": (
        "enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens"
        " blend_special_str"
    ),
    "tiers are looked up in order, and chunks are stored in all of them": "retrieve_locations store_location",
    "hosts share records through the tier valkey, mooncake or s3, see docs/tiers/": (
        "enable_p2p p2p_host p2p_init_ports p2p_lookup_ports distributed_url transfer_channel"
    ),
    "this version has no controller": (
        "enable_controller lmcache_instance_id controller_pull_url controller_reply_url"
        " lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time"
        " lmcache_worker_heartbeat_time"
    ),
    "disaggregated prefill uses a shared tier and kv_role, see docs/disaggregated.md": (
        "enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port"
        " pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec"
        " pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode"
        " pd_skip_proxy_notification pd_bidirectional enable_nixl nixl_backends nixl_buffer_size"
        " nixl_buffer_device nixl_enable_gc nixl_receiver_host nixl_receiver_port nixl_peer_port"
    ),
    "this version has no GPUDirect storage tier": (
        "gds_path gds_path_sharding gds_buffer_size use_gds gds_backend cufile_buffer_size weka_path pfs_path"
    ),
    "this version has no tier on CXL memory": "maru_path maru_pool_size",
    "stores and loads are always asynchronous": "enable_async_loading",
    "memory is placed by the kernel's policy": "numa_mode",
    "Python's garbage collector is not changed": "py_enable_gc",
    "every request is cached, whatever its priority": "priority_limit",
    "hits are loaded if that is faster than recomputing, see vllm.load_policy": (
        "min_retrieve_tokens hit_miss_ratio"
    ),
    "pins expire, see vllm.lookup_pin_ttl_s": "pin_check_interval_sec",
    "an error of a tier is always a miss or a counted drop": "error_handling",
    "KV events are published by vLLM, see --kv-events-config in docs/metrics.md": "enable_kv_events",
    "status and metrics are served read-only at http.listen, see docs/status.md": (
        "internal_api_server_enabled internal_api_server_host internal_api_server_port_start"
        " internal_api_server_include_index_list internal_api_server_socket_path_prefix"
        " script_allowed_imports"
    ),
    "plug-ins are registered by entry points and named under tiers": (
        "runtime_plugin_locations storage_plugins remote_storage_plugins"
    ),
    "the engine of each rank answers lookups of its shard": (
        "external_lookup_client lookup_url lookup_server_worker_ids enable_scheduler_bypass_lookup"
        " audit_actual_remote_url"
    ),
    "the arena is mapped at start and touched in the background, see arena.prefault": (
        "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio"
        " lazy_memory_step_ratio lazy_memory_safe_size"
    ),
    "chunks are always counted, see the engine's statistics": (
        "enable_chunk_statistics chunk_statistics_auto_start_statistics"
        " chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks"
        " chunk_statistics_strategy"
    ),
    "the configuration is read from a file, the environment and kv_connector_extra_config only": (
        "remote_config_url app_id"
    ),
    _HIDDEN: (
        "enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode"
    ),
    _PROCESS: "mp_host mp_port",
    "use local_cpu or local_disk": "local_device max_local_cache_size pipelined_backend",
    # Settings of the connector, in kv_connector_extra_config.
    "the sockets are in vllm.socket_dir": "lmcache_rpc_port",
    "all tokens of a request are cached": "skip_last_n_tokens",
    "there is one connector only": "use_native",
}

_VARIABLES_BY_REASON = {
    "set VLLM_LOGGING_LEVEL in vLLM, or configure Python's logging elsewhere": "log_level log_format",
    "no usage data is collected": (
        "track_usage usage_track_url request_telemetry_type request_telemetry_endpoint"
    ),
    "there is one engine only": "use_experimental use_upstream_mp device_backend",
    "use kv_role kv_consumer, or skip_save in kv_transfer_params of single requests": "force_skip_save",
    "this version has no such tracing": (
        "debug access_log enable_profiling enable_layer_timing debug_ipc_lifecycle debug_object_group_sizes"
    ),
    _PROCESS: "server_url coordinator_url",
}

UNSUPPORTED = {key: why for why, keys in _KEYS_BY_REASON.items() for key in keys.split()}
"""Settings without an equivalent here, and the reason."""

UNSUPPORTED_VARIABLES = {key: why for why, keys in _VARIABLES_BY_REASON.items() for key in keys.split()}
"""Settings that LMCache reads from variables only, without an equivalent here, and the reason."""

UNSUPPORTED_PREFIXES = {"mp.": _PROCESS, "q.": _LAYERS, "ec_": _HIDDEN, "ec.": _HIDDEN}
"""Prefixes of settings without an equivalent here, and the reason."""


def looks_like_lmcache(content: Mapping[str, Any]) -> bool:
    """Return whether a file is in LMCache's format: more of its keys exist only in LMCache than only here."""
    ours = sum(key in EngineConfig.model_fields and key not in SUPPORTED for key in content)
    theirs = sum(
        key not in EngineConfig.model_fields
        and (
            _current_name(key) in {*SUPPORTED, "extra_config"}
            or _unsupported_reason(_current_name(key), variable=False) is not None
        )
        for key in content
    )
    return theirs > ours


def found_in_mapping(content: Mapping[str, Any], origin: Origin, precedence: Precedence) -> list[Setting]:
    return [
        Setting((_current_name(key),), value, origin.place((key,)), precedence)
        for key, value in content.items()
    ]


def found_in_variables(env: Mapping[str, str]) -> list[Setting]:
    """Return the settings of the `LMCACHE_*` variables, except `LMCACHE_ASYNC_*`. Empty variables are ignored."""
    found: list[Setting] = []
    for name in sorted(env):
        key = name.removeprefix(VARIABLE_PREFIX).lower()
        value = _unquoted(env[name].strip())
        if not name.startswith(VARIABLE_PREFIX) or name.startswith(PREFIX) or key == CONFIG_FILE.lower():
            continue
        if value and not is_service_link(name, value):
            found.append(Setting((_current_name(key),), value, name, Precedence.LMCACHE))
    return found


def split_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split kv_connector_extra_config into our settings and LMCache's, the latter without `lmcache.`."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in ((str(key), value) for key, value in extra.items()):
        is_theirs = key.startswith(EXTRA_PREFIX) or key in CONNECTOR_KEYS
        (theirs if is_theirs else ours)[key.removeprefix(EXTRA_PREFIX)] = value
    return ours, theirs


def translate(
    found: Iterable[Setting], tier_names: Callable[[], Collection[str]], problems: list[str]
) -> tuple[list[Setting], list[str]]:
    """Convert LMCache's settings to ours, and return a note for each setting without effect.

    Of two settings with the same key, the one with the higher precedence counts. `tier_names` gives the names of the
    installed tiers; it is called only for a `remote_url`. Unknown settings and wrong values are added to `problems`.
    """
    chosen = {item.key: item for item in sorted(found, key=lambda item: item.precedence)}
    settings: list[Setting] = []
    notes: list[str] = []
    for convert in (
        *(partial(_translated, item, chosen, notes) for item in chosen.values()),
        partial(_tiers, chosen, tier_names, notes),
    ):
        try:
            settings += convert()
        except ConfigError as error:
            if str(error) not in problems:
                problems.append(str(error))
    return settings, notes


def _translated(item: Setting, chosen: Mapping[str, Setting], notes: list[str]) -> list[Setting]:
    """Convert one setting. Settings of tiers are converted together, by `_tiers`."""
    key, is_set = item.key, unless_none(item.value) is not None
    if key in SUPPORTED:
        ours, convert = SUPPORTED[key]
        if convert is None or not is_set:
            return []
        if key == "max_local_cpu_size" and _matches_behaviour(item) and not _has_cpu(chosen):
            notes.append(f"{item.place}: {key}: the other tiers pass through the arena, see arena.max_bytes")
            return []
        return [Setting(tuple(ours.split(".")), item.parsed(convert), item.place, item.precedence)]
    if key == "extra_config":
        options = item.parsed(parse_mapping) if is_set else {}
        notes += [f"{item.place}: extra_config.{name}: an option of LMCache's backends" for name in options]
        return []
    why = _unsupported_reason(key, variable=item.precedence is Precedence.LMCACHE)
    if why is None:
        choice = nearest(key, [*SUPPORTED, *UNSUPPORTED, *ALIASES])
        raise ConfigError(f"{item.place}: LMCache has no setting {key}{hint(choice, item.place)}")
    if not _matches_behaviour(item):
        notes.append(f"{item.place}: {key}: {why}")
    return []


def _tiers(
    chosen: Mapping[str, Setting], tier_names: Callable[[], Collection[str]], notes: list[str]
) -> list[Setting]:
    """Convert LMCache's cpu, disk and remote to one setting `tiers`. Return an empty list if none of them is set."""
    used = [chosen[key] for key in ("local_cpu", "local_disk", "remote_url") if key in chosen]
    size, disk, remote = (chosen.get(key) for key in ("max_local_disk_size", "local_disk", "remote_url"))
    tiers: list[Any] = ["cpu"] if _has_cpu(chosen) else []
    if disk and (path := disk.parsed(_disk_path)):
        if size is None or _matches_behaviour(size):
            raise ConfigError(
                f"{disk.place}: local_disk is {show(disk.value)}: expected max_local_disk_size beside it,"
                " a number of GiB above 0 (without it LMCache never uses the disk)"
            )
        tiers.append({"name": "disk", "path": path, "max_bytes": size.parsed(_gibibytes)})
        used.append(size)
    elif size and not _matches_behaviour(size):
        notes.append(f"{size.place}: max_local_disk_size: there is no local_disk")
    if remote and unless_none(remote.value) is not None:
        scheme = remote.parsed(_url_scheme)
        names = list(dict.fromkeys((scheme, REMOTE_TIERS.get(scheme, scheme))))
        if name := next((name for name in names if name in tier_names()), None):
            tiers.append({"name": name, "url": remote.value})
        else:
            notes.append(
                f"{remote.place}: remote_url: {scheme}:// needs a tier plug-in named {' or '.join(names)};"
                " none is installed and this version includes none"
            )
    if not used:
        return []
    last = max(used, key=lambda item: item.precedence)
    if not tiers:
        raise ConfigError(
            f"{last.place}: {last.key} is {show(last.value)}: no tier is left:"
            " expected local_cpu on, a local_disk, or a remote_url whose tier is installed"
        )
    sources = dict.fromkeys(item.place.partition(", line ")[0] for item in used)
    return [Setting(("tiers",), tiers, " and ".join(sources), last.precedence)]


def _has_cpu(chosen: Mapping[str, Setting]) -> bool:
    local_cpu = chosen.get("local_cpu")
    return local_cpu is None or unless_none(local_cpu.value) is None or bool(local_cpu.parsed(parse_flag))


def _disk_path(value: object) -> str | None:
    if value is False or str(value).strip().lower() in {"", "none", "null", "false", "off", "no"}:
        return None
    # As in LMCache, the text after `file://` is a path without a host and without percent encoding.
    path = value.strip().removeprefix("file://") if isinstance(value, str) else ""
    if not path or "," in path:
        raise ValueError("expected one path, plain or as file://; name several disk tiers under tiers")
    return path


def _url_scheme(value: object) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a URL, such as redis://host:6379")
    return match[1].lower()


def _unsupported_reason(key: str, *, variable: bool) -> str | None:
    family = next((why for prefix, why in UNSUPPORTED_PREFIXES.items() if key.startswith(prefix)), None)
    return UNSUPPORTED.get(key) or family or (UNSUPPORTED_VARIABLES.get(key) if variable else None)


def _matches_behaviour(item: Setting) -> bool:
    """Whether the value of a setting matches the behaviour here."""
    text = str(item.value).strip().lower()
    return text == DEFAULTS[item.key] if item.key in DEFAULTS else text in _OFF


def _current_name(key: str) -> str:
    return ALIASES.get(key, key)


def _unquoted(text: str) -> str:
    """Remove quotes around the whole value of a variable, as LMCache does."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text
