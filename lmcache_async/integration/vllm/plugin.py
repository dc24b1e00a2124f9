"""Registration of the connector with vLLM, which calls `register` in each of its processes."""

from __future__ import annotations

NAME = "LMCacheAsyncConnector"


def register() -> None:
    """Register the connector. Entry point of the group `vllm.general_plugins`; repeated calls have no effect."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmcache_async.integration.vllm.connector", NAME)
