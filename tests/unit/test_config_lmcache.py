"""LMCache's file and variables: converted, reported with the reason, or refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.config.lmcache import (
    ALIASES,
    CONNECTOR_KEYS,
    DEFAULTS,
    SUPPORTED,
    UNSUPPORTED,
    UNSUPPORTED_VARIABLES,
)
from lmcache_async.config.validation import known_keys
from lmcache_async.errors import ConfigError

GIB = 2**30
# LMCache's own list (lmcache/v1/config.py), repeated here so that no key is missed.
LMCACHE_KEYS = str.split("""
chunk_size local_cpu max_local_cpu_size local_cpu_use_hugepages reserve_local_cpu_size local_disk
local_disk_path_sharding max_local_disk_size remote_url remote_serde use_layerwise save_decode_cache
pre_caching_hash_algorithm enable_blending blend_recompute_ratios blend_thresholds blend_check_layers
blend_min_tokens blend_special_str retrieve_locations store_location enable_p2p p2p_host p2p_init_ports
p2p_lookup_ports mp_host mp_port enable_controller lmcache_instance_id controller_pull_url controller_reply_url
lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time
enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port
pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec pd_shutdown_timeout_sec
pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional
transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device gds_path gds_path_sharding gds_buffer_size
maru_path maru_pool_size use_gds gds_backend audit_actual_remote_url internal_api_server_host extra_config
save_unfull_chunk blocking_timeout_secs external_lookup_client py_enable_gc cache_policy
cost_aware_half_life_seconds cost_aware_ewma_alpha numa_mode enable_async_loading internal_api_server_enabled
internal_api_server_port_start priority_limit internal_api_server_include_index_list
internal_api_server_socket_path_prefix runtime_plugin_locations storage_plugins remote_storage_plugins
lookup_timeout_ms min_retrieve_tokens hit_miss_ratio lookup_server_worker_ids enable_scheduler_bypass_lookup
script_allowed_imports enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio
lazy_memory_step_ratio lazy_memory_safe_size enable_chunk_statistics chunk_statistics_auto_start_statistics
chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks
chunk_statistics_strategy enable_kv_events use_gpu_connector_v3 pin_timeout_sec pin_check_interval_sec
remote_config_url app_id enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers
hidden_states_retrieve_mode
enable_xpyd nixl_peer_host nixl_peer_init_port nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port nixl_role
controller_url lmcache_worker_port plugin_locations external_backends nixl_peer_port
""")


@pytest.fixture
def load(tmp_path, caplog):
    """Return a function that loads LMCache's YAML and variables and returns the config and the warnings."""

    def load(text: str | None = None, extra=None, **variables) -> tuple[EngineConfig, list[str]]:
        env = {f"LMCACHE_{name}": value for name, value in variables.items()}
        if text is not None:
            file = tmp_path / "lmcache.yaml"
            file.write_text(text)
            env["LMCACHE_CONFIG_FILE"] = str(file)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lmcache_async.config"):
            config = load_config(env=env, extra=extra)
        return config, [record.getMessage() for record in caplog.records]

    return load


def tiers(config: EngineConfig) -> list[tuple[str, dict]]:
    return [(tier.name, dict(tier.options)) for tier in config.tiers]


def test_a_common_file_of_lmcache(load):
    config, warnings = load(
        "chunk_size: 128\nlocal_cpu: true\nmax_local_cpu_size: 5.0\n"
        'local_disk: "file:///var/kv/"\nmax_local_disk_size: 0.5\nsave_decode_cache: no\nsave_unfull_chunk: no\n'
    )

    assert config.chunk_size == 128
    assert config.arena.max_bytes == 5 * GIB
    assert tiers(config) == [("cpu", {}), ("disk", {"path": "/var/kv/", "max_bytes": GIB // 2})]
    assert (config.store.generated_tokens, config.store.partial_chunks) == (False, False)
    assert warnings == []


@pytest.mark.parametrize("path", ["local_disk/", "/var/kv%20a", "/var/kv#1"])
def test_a_local_disk_after_file_is_a_path(load, path):
    config, _ = load(f"local_cpu: true\nlocal_disk: 'file://{path}'\nmax_local_disk_size: 1")

    assert tiers(config)[1] == ("disk", {"path": path, "max_bytes": GIB})


def test_variables_of_lmcache_override_single_keys_of_its_file(load):
    config, _ = load(
        "local_disk: /var/kv\nmax_local_disk_size: 1\nchunk_size: 4", MAX_LOCAL_DISK_SIZE="2", CHUNK_SIZE="8"
    )

    assert tiers(config)[1] == ("disk", {"path": "/var/kv", "max_bytes": 2 * GIB})
    assert config.chunk_size == 8


@pytest.mark.parametrize(
    ("name", "value", "get", "expected"),
    [
        ("MAX_LOCAL_CPU_SIZE", "0.5", lambda config: config.arena.max_bytes, GIB // 2),
        ("LOCAL_CPU_USE_HUGEPAGES", "off", lambda config: config.arena.huge_pages, False),
        ("SAVE_DECODE_CACHE", "no", lambda config: config.store.generated_tokens, False),
        ("SAVE_UNFULL_CHUNK", "no", lambda config: config.store.partial_chunks, False),
        ("BLOCKING_TIMEOUT_SECS", "7", lambda config: config.retrieve.timeout_s, 7),
        ("LOOKUP_TIMEOUT_MS", "3000", lambda config: config.vllm.lookup_timeout_s, 3),
        ("PIN_TIMEOUT_SEC", "300", lambda config: config.vllm.lookup_pin_ttl_s, 300),
        ("LOCAL_CPU", "yes", tiers, [("cpu", {})]),
        ("LOCAL_DISK", "None", tiers, [("cpu", {})]),
        ("LOCAL_DISK", "false", tiers, [("cpu", {})]),
        ("CHUNK_SIZE", "'16'", lambda config: config.chunk_size, 16),
    ],
)
def test_a_supported_variable(load, name, value, get, expected):
    config, warnings = load(**{name: value})

    assert get(config) == expected
    assert warnings == []


def test_a_disk_without_cpu_leaves_the_arena_for_staging(load):
    config, warnings = load(
        LOCAL_CPU="False", LOCAL_DISK="/var/kv", MAX_LOCAL_DISK_SIZE="1", MAX_LOCAL_CPU_SIZE="0"
    )

    assert tiers(config) == [("disk", {"path": "/var/kv", "max_bytes": GIB})]
    assert config.arena == EngineConfig().arena
    assert warnings == [
        (
            "these settings of LMCache have no effect:\n  LMCACHE_MAX_LOCAL_CPU_SIZE: max_local_cpu_size:"
            " the other tiers pass through the arena, see arena.max_bytes"
        )
    ]


def test_tiers_from_lmcache_have_an_origin(load):
    config, _ = load("local_disk: /var/kv", MAX_LOCAL_DISK_SIZE="1")

    assert config.tiers[1].where.endswith("lmcache.yaml and LMCACHE_MAX_LOCAL_DISK_SIZE: tiers[1] (disk)")


def test_extra_config_accepts_keys_of_lmcache_with_its_prefix(load):
    config, warnings = load(
        CHUNK_SIZE="1",
        extra={"lmcache.chunk_size": 2, "lmcache.mp.host": "h", "discard_partial_chunks": True},
    )

    assert (config.chunk_size, config.store.partial_chunks) == (2, False)
    assert load(extra={"chunk_size": 1, "lmcache.chunk_size": 2})[0].chunk_size == 1  # ours takes precedence
    assert warnings == [
        (
            "these settings of LMCache have no effect:\n  kv_connector_extra_config: mp.host:"
            " use the tier host with lmcache-async serve, see docs/tiers/host.md"
        )
    ]


def test_a_file_of_lmcache_is_recognised_under_any_name_also_with_a_typo(tmp_path):
    file = tmp_path / "any.yaml"
    file.write_text("local_cpu: true\nmax_local_cpu_size: 2\n")
    assert load_config(file, env={}).arena.max_bytes == 2 * GIB

    file.write_text("local_cpu: true\nmax_local_cpu_sise: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, env={})

    assert str(caught.value) == (
        f"{file}, line 2: LMCache has no setting max_local_cpu_sise; did you mean max_local_cpu_size?"
    )


def test_one_warning_names_each_setting_without_effect(load, tmp_path):
    config, warnings = load(
        "enable_p2p: true\ncontroller_url: tcp://x\nextra_config: {a: 1, b: 2}\n",
        LMCACHE_INSTANCE_ID="one",
        LOG_LEVEL="DEBUG",
        EC_LOCAL_CPU="1",
        MAX_LOCAL_DISK_SIZE="5",
    )

    file = tmp_path / "lmcache.yaml"
    assert config == EngineConfig()
    assert warnings == [
        (
            "these settings of LMCache have no effect:"
            f"\n  {file}, line 1: enable_p2p: hosts share records through the tier valkey, mooncake or s3,"
            " see docs/tiers/"
            f"\n  {file}, line 2: controller_pull_url: this version has no controller"
            f"\n  {file}, line 3: extra_config.a: an option of LMCache's backends"
            f"\n  {file}, line 3: extra_config.b: an option of LMCache's backends"
            "\n  LMCACHE_EC_LOCAL_CPU: ec_local_cpu: this version stores KV only, no hidden states"
            "\n  LMCACHE_LMCACHE_INSTANCE_ID: lmcache_instance_id: this version has no controller"
            "\n  LMCACHE_LOG_LEVEL: log_level: set VLLM_LOGGING_LEVEL in vLLM, or configure Python's logging elsewhere"
            "\n  LMCACHE_MAX_LOCAL_DISK_SIZE: max_local_disk_size: there is no local_disk"
        )
    ]


def test_the_name_of_a_file_is_not_a_variable(tmp_path, monkeypatch):
    """Settings that LMCache reads from variables only are unknown in a file, whatever its name is."""
    monkeypatch.chdir(tmp_path)
    Path("LMCACHE_SETTINGS").write_text("log_level: DEBUG\n")

    with pytest.raises(ConfigError, match="LMCache has no setting log_level"):
        load_config(env={"LMCACHE_CONFIG_FILE": "LMCACHE_SETTINGS"})


def test_disabling_a_missing_feature_is_not_a_warning(load):
    text = "enable_p2p: false\nremote_url: null\nuse_layerwise: no\nnuma_mode: null\nextra_config: {}\n"

    assert load(text, CACHE_POLICY="LRU", REMOTE_SERDE="naive", USE_EXPERIMENTAL="True")[1] == []


def test_the_file_of_lmcache_is_not_read_beside_ours(tmp_path, caplog):
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text("chunk_size: 4\n")
    theirs.write_text("chunk_size: 8\n")

    config = load_config(env={"LMCACHE_ASYNC_CONFIG_FILE": str(ours), "LMCACHE_CONFIG_FILE": str(theirs)})

    assert config.chunk_size == 4
    assert f"LMCACHE_CONFIG_FILE: {theirs} is not read, {ours} is" in caplog.text


def test_a_variable_of_lmcache_that_replaces_our_tiers_is_a_warning(tmp_path, caplog):
    ours = tmp_path / "ours.yaml"
    ours.write_text("tiers: [cpu, {name: disk, path: /x}]\n")

    config = load_config(ours, env={"LMCACHE_LOCAL_CPU": "yes"})

    assert tiers(config) == [("cpu", {})]
    assert f"{ours}, line 1: tiers: LMCACHE_LOCAL_CPU takes precedence over the file" in caplog.text


@pytest.mark.parametrize("scheme", ["hf3fs", "lm", "nixl"])
def test_a_remote_url_without_a_tier_is_a_warning(load, scheme):
    config, (warning,) = load(REMOTE_URL=f"{scheme}://host:1")

    assert tiers(config) == [("cpu", {})]
    assert f"\n  LMCACHE_REMOTE_URL: remote_url: {scheme}:// needs a tier plug-in named {scheme}" in warning
    assert "none is installed and this version includes none" in warning


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://host:6379", "redis"),
        ("rediss://host", "valkey"),
        ("redis-sentinel://a,b", "valkey"),
        ("mooncakestore://host:6379", "mooncake"),
        ("lm://host:6379", "lm"),  # of another distribution
    ],
)
def test_a_remote_url_is_the_installed_tier_of_its_scheme(load, tmp_path, monkeypatch, url, name):
    metadata = tmp_path / "remote_tiers-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: remote-tiers\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[lmcache_async.tiers]\nlm = remote:Tier\n")
    monkeypatch.syspath_prepend(tmp_path)

    config, warnings = load(REMOTE_URL=url, LOCAL_CPU="no")

    assert tiers(config) == [(name, {"url": url})]
    assert warnings == []


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"LOCAL_DISK": "/x", "MAX_LOCAL_DISK_SIZE": "0.0"}, "LMCACHE_LOCAL_DISK: local_disk is '/x': expected max_local_disk_size beside it, a number of GiB above 0 (without it LMCache never uses the disk)"),
        ({"LOCAL_DISK": "/x", "MAX_LOCAL_DISK_SIZE": "5GB"}, "LMCACHE_MAX_LOCAL_DISK_SIZE: max_local_disk_size is '5GB': expected a number of GiB above 0"),
        ({"MAX_LOCAL_CPU_SIZE": "1e308"}, "LMCACHE_MAX_LOCAL_CPU_SIZE: max_local_cpu_size is '1e308': expected at most 4294967296 GiB"),
        ({"MAX_LOCAL_CPU_SIZE": "0"}, "LMCACHE_MAX_LOCAL_CPU_SIZE: max_local_cpu_size is '0': expected a number of GiB above 0"),
        ({"MAX_LOCAL_CPU_SIZ": "1"}, "LMCACHE_MAX_LOCAL_CPU_SIZ: LMCache has no setting max_local_cpu_siz; did you mean LMCACHE_MAX_LOCAL_CPU_SIZE?"),
        ({"EXTRA_CONFIG": "a"}, "LMCACHE_EXTRA_CONFIG: extra_config is 'a': expected a mapping, such as {\"key\": \"value\"}"),
    ],
)  # fmt: skip
def test_an_invalid_setting_of_lmcache_is_reported(load, variables, text):
    with pytest.raises(ConfigError) as caught:
        load(**variables)

    assert str(caught.value) == text


def test_every_key_of_lmcache_is_converted_or_has_a_reason():
    converted = {key for key in LMCACHE_KEYS if ALIASES.get(key, key) in SUPPORTED}
    explained = {key for key in LMCACHE_KEYS if ALIASES.get(key, key) in {*UNSUPPORTED, "extra_config"}}

    assert converted ^ explained == {*LMCACHE_KEYS}


def test_the_tables_name_existing_keys():
    assert {ours for ours, _ in SUPPORTED.values()} <= set(known_keys(EngineConfig))
    assert set(DEFAULTS) <= {*UNSUPPORTED, *UNSUPPORTED_VARIABLES}
    assert {*UNSUPPORTED, *SUPPORTED} >= CONNECTOR_KEYS
    assert not set(SUPPORTED) & set(UNSUPPORTED)
    assert not set(ALIASES) & {*SUPPORTED, *UNSUPPORTED}


@given(st.sampled_from(sorted(UNSUPPORTED)), st.sampled_from(["7", "x", "[1]"]))
def test_a_setting_without_effect_never_changes_the_config(key, value):
    assert load_config(env={f"LMCACHE_{key.upper()}": value}) == EngineConfig()
