"""Places that refuse a config and cannot be reached by a case of ours: where each is tested, by a text of that test."""

from __future__ import annotations

ELSEWHERE: dict[str, tuple[str, str]] = {
    "lmcache_async/daemon/server.py: ConfigError(f'socket: another daemon listens at {path} already')": (
        "tests/daemon/test_session.py",
        "another daemon listens",
    ),
    "lmcache_async/engine/sync.py: ConfigError(f'engine {instance_id!r} exists with another config or other metadata; destroy it first, or use another instance id')": (
        "tests/unit/test_sync_engine.py",
        "exists with another config or other metadata",
    ),
    "lmcache_async/hashing/digest.py: MissingDependencyError(\"hash algorithm 'blake3' needs the package blake3: pip install 'lmcache-async[blake3]'\")": (
        "tests/unit/test_hashing_namespace.py",
        "lmcache-async\\[blake3\\]",
    ),
    "lmcache_async/integration/vllm/config.py: ConfigError(f'vllm.kv_head_shards is {shards}, but {reason}')": (
        "tests/unit/vllm/test_config.py",
        "test_numbers_of_head_shards_that_are_refused",
    ),
    "lmcache_async/integration/vllm/worker.py: ConfigError(f'vllm.kv_head_shards is {shard.shards}, but the KV cache of {name} has the shape {shape}, which is not that of {spec.num_kv_heads} heads of {content} elements; expected none')": (
        "tests/unit/vllm/test_config.py",
        "which is not that of 2 heads",
    ),
    "lmcache_async/integration/vllm/lookup_server.py: ConfigError(f'kv_transfer_config.engine_id: process {process} serves {path} already; give each vLLM an engine_id of its own, or none')": (
        "tests/security/test_lookup_socket.py",
        "an engine_id of its own",
    ),
    "lmcache_async/integration/vllm/lookup_server.py: ConfigError(f'vllm.lookup_transport: cannot listen at {host}: {error}; set VLLM_HOST_IP to an address of this host')": (
        "tests/security/test_lookup_socket.py",
        "vllm\\.lookup_transport: cannot listen at",
    ),
    "lmcache_async/integration/vllm/lookup_server.py: ConfigError(f'vllm.socket_dir: cannot listen at {path}: {error}')": (
        "tests/security/test_lookup_socket.py",
        "vllm\\.socket_dir: cannot listen at",
    ),
    "lmcache_async/memory/encryption.py: MissingDependencyError(\"encryption needs the package cryptography: pip install 'lmcache-async[encryption]'\")": (
        "tests/security/test_encryption.py",
        "MissingDependencyError, match",
    ),
    "lmcache_async/registry.py: ConfigError(f'the {_kind(group)} {name} is offered by {both}; uninstall one of them')": (
        "tests/unit/test_registry.py",
        "uninstall one of them",
    ),
    "lmcache_async/registry.py: ConfigError(f'the {_kind(group)} {name} of {plugin.distribution} {plugin.version} cannot be loaded from {plugin.value}: {error}')": (
        "tests/unit/test_registry.py",
        "cannot be loaded from",
    ),
    "lmcache_async/registry.py: ConfigError(f'{what} cannot be loaded from {plugin.value}: {error}')": (
        "tests/unit/test_registry.py",
        "cannot be loaded from",
    ),
    "lmcache_async/registry.py: MissingDependencyError(f\"{what} needs the package {module}, which is not installed: pip install '{package}'\")": (
        "tests/unit/test_registry.py",
        "which is not installed",
    ),
    "plugins/disk/directory.py: ConfigError(f'odirect is true, but the file system of {directory.root} refuses direct I/O: set odirect to auto or false')": (
        "tests/tiers/test_disk.py",
        'ConfigError, match="odirect"',
    ),
    "plugins/mooncake/pool.py: MissingDependencyError(f\"the tier mooncake needs the package {error.name}, which is not installed: pip install 'lmcache-async[mooncake]' (without CUDA: mooncake-transfer-engine-non-cuda)\")": (
        "tests/tiers/test_mooncake_config.py",
        "mooncake-transfer-engine-non-cuda",
    ),
    "plugins/mooncake/pool.py: MissingDependencyError(f'the tier mooncake needs a system library that is missing: {error}: {_advice(str(error))}')": (
        "tests/tiers/test_mooncake_config.py",
        "MissingDependencyError",
    ),
    "plugins/s3/stores.py: ConfigError(f'{config.url}: {reason(error)}')": (
        "tests/tiers/test_s3_config.py",
        'ConfigError, match="az://c"',
    ),
    "plugins/s3/stores.py: ConfigError(f'ca_file: {config.ca_file} cannot be read: {error.strerror}')": (
        "tests/tiers/test_s3_config.py",
        'ConfigError, match="cannot be read"',
    ),
    "plugins/valkey/tier.py: ConfigError(str(answer))": (
        "tests/tiers/test_valkey_answers.py",
        "ConfigError, match=\"answered 'ERR'\"",
    ),
    "lmcache_async/metrics/tracing.py: MissingDependencyError(\"tracing.enabled needs OpenTelemetry: pip install 'lmcache-async[otel]'\")": (
        "tests/unit/test_tracing.py",
        'MissingDependencyError, match=r"tracing',
    ),
    "lmcache_async/config/model.py: ConfigError(f'{names}: they cannot be used: {error}')": (
        "tests/web/test_server.py",
        "they cannot be used",
    ),
    "lmcache_async/metrics/http.py: ConfigError(f'{_OPTION}: {file} contains no token; generate one with: openssl rand -hex 32')": (
        "tests/web/test_access.py",
        "contains no token",
    ),
    "lmcache_async/metrics/http.py: ConfigError(f'{_OPTION}: {file}, line {number}: a token must have at least {MIN_TOKEN_CHARACTERS} ASCII characters and no space')": (
        "tests/web/test_access.py",
        "line 1: a token must have at least 16",
    ),
    "lmcache_async/metrics/endpoint.py: MissingDependencyError(\"http.listen needs the package aiohttp, which is not installed: pip install 'lmcache-async[http]'\")": (
        "tests/web/test_engine.py",
        "lmcache-async[http]",
    ),
    "lmcache_async/metrics/server.py: ConfigError(f'http.listen: cannot listen at {place}: {text}')": (
        "tests/web/test_server.py",
        "http\\.listen: cannot listen at",
    ),
    "lmcache_async/metrics/server.py: ConfigError(f'http.listen: with the rank added it is {place}; ports end at {_MAX_PORT}')": (
        "tests/web/test_server.py",
        "ports end at 65535",
    ),
    "lmcache_async/tiers/handle.py: ConfigError(f'tier {name!r}: its `capabilities` must be an instance of Capabilities')": (
        "tests/tiers/test_border.py",
        "must be an instance of Capabilities",
    ),
}
