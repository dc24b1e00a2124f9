"""What vLLM calls in each of its processes: makes the connector known by its name."""

from __future__ import annotations

NAME = "LMCacheAsyncConnector"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. Calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmcache_async.integration.vllm.connector", NAME)
