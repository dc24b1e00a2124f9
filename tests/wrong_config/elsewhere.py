"""Statements that refuse a config and cannot be reached by a case here, and where each is tested.

A line has a source file and a unique part of the statement, then a test file and a part of that test.
"""

from __future__ import annotations

ELSEWHERE = [
    tuple(part.strip() for part in line.split(" | "))
    for line in r"""
lmcache_async/config/model.py | they cannot be used | tests/web/test_server.py | they cannot be used
lmcache_async/daemon/server.py | exists and is not a socket | tests/daemon/test_session.py | exists and is not a socket
lmcache_async/daemon/server.py | another daemon listens | tests/daemon/test_session.py | another daemon listens
lmcache_async/engine/builder.py | expected a multiple of the | tests/unit/test_engine_groups.py | expected a multiple of the 8 tokens of a block
lmcache_async/engine/builder.py | the hash key of the namespace | tests/security/test_secrets.py | hash_key: the hash key of the namespace
lmcache_async/engine/builder.py | chunk_size: {error} | tests/unit/test_engine_groups.py | chunk_size: a record's header
lmcache_async/engine/sync.py | exists with another config | tests/unit/test_sync_engine.py | exists with another config or other metadata
lmcache_async/hashing/digest.py | needs the package blake3 | tests/unit/test_hashing_namespace.py | lmcache-async\[blake3\]
lmcache_async/integration/vllm/config.py | kv_head_shards is {shards}, but {reason} | tests/unit/vllm/test_config.py | test_unsuitable_numbers_of_head_shards_are_refused
lmcache_async/integration/vllm/lookup_server.py | give each vLLM a separate engine_id | tests/security/test_lookup_socket.py | a separate engine_id
lmcache_async/integration/vllm/lookup_server.py | set VLLM_HOST_IP | tests/security/test_lookup_socket.py | vllm\.lookup_transport: cannot listen at
lmcache_async/integration/vllm/lookup_server.py | vllm.socket_dir: cannot listen | tests/security/test_lookup_socket.py | vllm\.socket_dir: cannot listen at
lmcache_async/integration/vllm/worker.py | which is not that of | tests/unit/vllm/test_config.py | which is not that of 2 heads
lmcache_async/memory/encryption.py | need the package cryptography | tests/security/test_encryption.py | MissingDependencyError, match
lmcache_async/metrics/endpoint.py | needs the package aiohttp | tests/web/test_engine.py | lmcache-async[http]
lmcache_async/metrics/http.py | contains no token | tests/web/test_access.py | contains no token
lmcache_async/metrics/http.py | a token must have at least | tests/web/test_access.py | line 1: a token must have at least 16
lmcache_async/metrics/server.py | cannot listen at | tests/web/test_server.py | http\.listen: cannot listen at
lmcache_async/metrics/server.py | the highest port is | tests/web/test_server.py | the highest port is 65535
lmcache_async/metrics/tracing.py | needs OpenTelemetry | tests/unit/test_tracing.py | MissingDependencyError, match=r"tracing
lmcache_async/registry.py | uninstall one of them | tests/unit/test_registry.py | uninstall one of them
lmcache_async/registry.py | {plugin.version} cannot be loaded from | tests/unit/test_registry.py | cannot be loaded from
lmcache_async/registry.py | {what} cannot be loaded from | tests/unit/test_registry.py | cannot be loaded from
lmcache_async/registry.py | which is not installed | tests/unit/test_registry.py | which is not installed
lmcache_async/tiers/handle.py | must be an instance of Capabilities | tests/tiers/test_border.py | must be an instance of Capabilities
lmcache_async/tiers/offline.py | lower --max-record-bytes | tests/maintenance/test_arguments.py | lower --max-record-bytes
plugins/disk/directory.py | refuses direct I/O | tests/tiers/test_disk.py | ConfigError, match="odirect"
plugins/mooncake/pool.py | needs the package | tests/tiers/test_mooncake_config.py | mooncake-transfer-engine-non-cuda
plugins/mooncake/pool.py | needs a system library | tests/tiers/test_mooncake_config.py | MissingDependencyError
plugins/s3/bucket.py | {config.url}: {reason(error)} | tests/tiers/test_s3_config.py | ConfigError, match="az://c"
plugins/s3/bucket.py | cannot be read | tests/tiers/test_s3_config.py | ConfigError, match="cannot be read"
plugins/s3/bucket.py | {config.url}: {name} contains a line break or another control character; remove it | tests/tiers/test_s3_config.py | ConfigError, match=f"{name} contains a line break"
plugins/valkey/tier.py | str(answer) | tests/tiers/test_valkey_answers.py | ConfigError, match="answered 'ERR'"
""".strip().splitlines()
]
