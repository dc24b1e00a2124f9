"""Every setting that LMCache knows: what it is called here, or why there is nothing to set."""

from __future__ import annotations

RENAMED = {
    "chunk_size": "chunk_size",
    "max_local_cpu_size": "arena.max_bytes",
    "local_cpu_use_hugepages": "arena.huge_pages",
    "save_decode_cache": "store.generated_tokens",
    "save_unfull_chunk": "store.partial_chunks",
    "discard_partial_chunks": "store.partial_chunks",
    "blocking_timeout_secs": "retrieve.timeout_s",
    "lookup_timeout_ms": "vllm.lookup_timeout_s",
    "pin_timeout_sec": "vllm.lookup_pin_ttl_s",
    "local_cpu": "tiers",
    "local_disk": "tiers",
    "max_local_disk_size": "tiers",
    "remote_url": "tiers",
}
"""LMCache's keys that have a meaning here, and the key that they set."""

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
"""Older names that LMCache still takes."""

REMOTE_TIERS = {
    "redis": "valkey",
    "rediss": "valkey",
    "unix": "valkey",
    "redis-sentinel": "valkey",
    "valkey": "valkey",
    "s3": "s3",
    "mooncakestore": "mooncake",
}
"""The tier that a `remote_url` of this scheme means, unless there is a tier of the scheme's own name."""

CONNECTOR_KEYS = frozenset({"discard_partial_chunks", "lmcache_rpc_port", "skip_last_n_tokens", "use_native"})
"""What LMCache's connector reads from kv_connector_extra_config without the prefix `lmcache.`."""

DEFAULTS = {
    "remote_serde": "naive",
    "pre_caching_hash_algorithm": "builtin",
    "cache_policy": "lru",
    "py_enable_gc": "true",
    "transfer_channel": "",
    "track_usage": "false",
    "use_experimental": "true",
}
"""Values that ask for what happens here anyway. Of any other unsupported key that is: off, 0, none or empty."""

_DISAGGREGATED = "prefill and decode meet in a tier that both reach, see kv_role in docs/disaggregated.md"
_P2P = "records of other hosts are shared by the tier valkey, mooncake or s3, name one under tiers; see docs/tiers/"
_CONTROLLER = "this version has no controller"
_BLENDING = "this version reuses prefixes only, it does not blend"
_GDS = "this version has no GPUDirect storage tier"
_LAZY = "the arena's memory is mapped at once and touched in the background, see arena.prefault"
_API = "status and metrics are at http.listen, see docs/status.md; no call there changes anything"
_STATISTICS = "chunks are always counted, see the engine's statistics"
_HIDDEN = "this version stores KV only, no hidden states"
_PLUGINS = "plug-ins are found by their entry points, name them under tiers"
_LOOKUP = "the lookup is the engine's own, each rank answers for its shard"
_PROCESS = "a pool beside the engines is the tier host with lmcache-async serve; see docs/tiers/host.md"
_LAYERS = "the layers of a chunk are moved together, in batches of store.batch_bytes"
_REMOTE_CONFIG = "the config is read from a file, the environment and kv_connector_extra_config only"
_TELEMETRY = "nothing is reported to anybody"

_UNSUPPORTED = {
    "records are stored as they are; name an encoding stage in store.stages": "remote_serde",
    "keys are made by hash_algorithm, they do not depend on PYTHONHASHSEED": "pre_caching_hash_algorithm",
    "each tier evicts by its own policy": "cache_policy cost_aware_half_life_seconds cost_aware_ewma_alpha",
    "the arena is as large as arena.max_bytes says": "reserve_local_cpu_size",
    "disk tiers take one path each; name several under tiers": "local_disk_path_sharding",
    "layer-wise loads are on where they help, see vllm.layerwise_load": "use_layerwise",
    _LAYERS: "use_gpu_connector_v3 experimental_sampled_layerwise_lookup",
    _BLENDING: "enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens"
    " blend_special_str",
    "chunks are looked for in the order of tiers and stored in all of them": "retrieve_locations store_location",
    _P2P: "enable_p2p p2p_host p2p_init_ports p2p_lookup_ports distributed_url transfer_channel",
    _CONTROLLER: "enable_controller lmcache_instance_id controller_pull_url controller_reply_url"
    " lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time",
    _DISAGGREGATED: "enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port"
    " pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec"
    " pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode"
    " pd_skip_proxy_notification pd_bidirectional enable_nixl nixl_backends nixl_buffer_size nixl_buffer_device"
    " nixl_enable_gc nixl_receiver_host nixl_receiver_port nixl_peer_port",
    _GDS: "gds_path gds_path_sharding gds_buffer_size use_gds gds_backend cufile_buffer_size weka_path pfs_path",
    "this version has no tier on CXL memory": "maru_path maru_pool_size",
    "stores and loads are always asynchronous": "enable_async_loading",
    "memory is placed by the kernel's policy": "numa_mode",
    "Python's garbage collector is left alone": "py_enable_gc",
    "every request is cached, whatever its priority": "priority_limit",
    "every hit is loaded as far as loading is faster than computing": "min_retrieve_tokens hit_miss_ratio",
    "pins end by themselves, see vllm.lookup_pin_ttl_s": "pin_check_interval_sec",
    "errors of a tier are always a miss or a counted drop": "error_handling",
    "KV events come with vLLM's own, see --kv-events-config in docs/metrics.md": "enable_kv_events",
    _API: "internal_api_server_enabled internal_api_server_host internal_api_server_port_start"
    " internal_api_server_include_index_list internal_api_server_socket_path_prefix script_allowed_imports",
    _PLUGINS: "runtime_plugin_locations storage_plugins remote_storage_plugins",
    _LOOKUP: "external_lookup_client lookup_url lookup_server_worker_ids enable_scheduler_bypass_lookup"
    " audit_actual_remote_url",
    _LAZY: "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio"
    " lazy_memory_step_ratio lazy_memory_safe_size",
    _STATISTICS: "enable_chunk_statistics chunk_statistics_auto_start_statistics"
    " chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks"
    " chunk_statistics_strategy",
    _REMOTE_CONFIG: "remote_config_url app_id",
    _HIDDEN: "enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode",
    _PROCESS: "mp_host mp_port",
    "write it as local_cpu or local_disk": "local_device max_local_cache_size pipelined_backend",
    # Of the connector, in kv_connector_extra_config.
    "the sockets are in vllm.socket_dir": "lmcache_rpc_port",
    "all tokens of a request are cached": "skip_last_n_tokens",
    "there is one connector only": "use_native",
}

_UNSUPPORTED_VARIABLES = {
    "levels are vLLM's, see VLLM_LOGGING_LEVEL; elsewhere Python's logging": "log_level log_format",
    _TELEMETRY: "track_usage usage_track_url request_telemetry_type request_telemetry_endpoint",
    "there is one engine only": "use_experimental use_upstream_mp device_backend",
    "kv_role kv_consumer stores nothing; single requests by kv_transfer_params skip_save": "force_skip_save",
    "this version has no such tracing": "debug access_log enable_profiling enable_layer_timing"
    " debug_ipc_lifecycle debug_object_group_sizes",
    _PROCESS: "server_url coordinator_url",
}

WHY_NOT = {key: why for why, keys in _UNSUPPORTED.items() for key in keys.split()}
"""LMCache's keys without a meaning here, and why."""

WHY_NOT_VARIABLES = {key: why for why, keys in _UNSUPPORTED_VARIABLES.items() for key in keys.split()}
"""What LMCache reads from the environment alone, without its prefix and in small letters, and why not here."""

WHY_NOT_PREFIXES = {"mp.": _PROCESS, "q.": _LAYERS, "ec_": _HIDDEN, "ec.": _HIDDEN}
"""Families of keys whose members are LMCache's own affair, and why they mean nothing here."""
