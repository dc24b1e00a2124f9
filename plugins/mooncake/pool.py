"""Batch calls of Mooncake's client, with its error codes translated. Blocking; run in threads."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from lmcache_async.errors import MissingDependencyError, TierError, TierFullError, TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake.store import MooncakeDistributedStore

    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.mooncake.config import MooncakeConfig
    from lmcache_async.types import ChunkKey

_CONNECT_S = 5.0
_LEAST_BYTES = 16 << 20
NOT_THERE = -704
NOT_YET = -703  # it is being written, and not visible
TOO_LONG = -600  # the object is longer than the memory for it
_FULL = -200
_PACKAGES = {
    "libibverbs": "libibverbs1",
    "libnl": "libibverbs1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
}
_MEANINGS = {
    -1: "internal error of the engine",
    -10: "the engine is out of memory",
    _FULL: "the pool is full: add segments, or let the master evict earlier",
    TOO_LONG: "invalid parameter",
    NOT_YET: "another client is writing the record",
    -706: "another client is reading the record",
    -707: "the read took longer than the master's lease: raise default_kv_lease_ttl",
    -800: "the transfer failed",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
}


class Pool:
    """Client of one master. All methods block; calls may be concurrent.

    Args:
        config: The options.
        store: A client that is already set up and is not closed; by default a new one.
    """

    def __init__(self, config: MooncakeConfig, store: MooncakeDistributedStore | None = None) -> None:
        self._config = config
        self._is_own = store is None
        engine = _engine()
        self._new_store = engine.MooncakeDistributedStore
        self._store = self._new_store() if store is None else store
        self._replication = engine.ReplicateConfig()
        self._replication.replica_num = config.replicas
        self._address: int | None = None

    @property
    def url(self) -> str:
        return self._config.url

    @property
    def is_joined(self) -> bool:
        return self._address is not None

    def join(self, address: int, nbytes: int) -> None:
        """Join the pool, and register the memory that records are read into and written from.

        Args:
            address: Start of the memory.
            nbytes: Length of the memory.

        Raises:
            TierUnavailableError: The master does not answer.
            TierError: The engine refuses the options or the memory.
        """
        if self._is_own:
            self._set_up()
        if code := self._store.register_buffer(address, nbytes):
            self._leave()
            raise TierError(
                f"the engine cannot register the arena's {nbytes} bytes for {self._config.protocol}: {meaning(code)};"
                " with rdma, check ulimit -l"
            )
        self._address = address

    def close(self) -> None:
        """Leave the pool, if it was joined."""
        if self._address is not None:
            self._store.unregister_buffer(self._address)
            self._address = None
            self._leave()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        codes = self._store.batch_is_exist(self._names(keys))
        if failed := next((code for code in codes if code < 0 and code not in {NOT_THERE, NOT_YET}), 0):
            raise self.error("find", keys[0], failed)
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[ChunkKey], buffers: Sequence[Buffer]) -> list[int]:
        """Read each record into its buffer. Return its length or an error code for each."""
        addresses, sizes = [each.address for each in buffers], [each.nbytes for each in buffers]
        return [int(answer) for answer in self._store.batch_get_into(self._names(keys), addresses, sizes)]

    def put(self, keys: Sequence[ChunkKey], buffers: Sequence[Buffer]) -> list[int]:
        """Write each record from its buffer. Return 0 or an error code for each."""
        addresses, sizes = [each.address for each in buffers], [each.nbytes for each in buffers]
        codes = self._store.batch_put_from(self._names(keys), addresses, sizes, self._replication)
        return [int(code) for code in codes]

    def remove(self, key: ChunkKey) -> bool:
        """Remove a record, also while others read it: they detect it by the checksum."""
        code = self._store.remove(self._names([key])[0], force=True)
        if code not in {0, NOT_THERE, NOT_YET}:
            raise self.error("remove", key, code)
        return bool(code == 0)

    def error(self, verb: str, key: ChunkKey, code: int) -> TierError:
        """Return the exception for an error code."""
        text = f"cannot {verb} {self._names([key])[0]} of {self._config.url}: {meaning(code)}"
        return TierFullError(text) if code == _FULL else TierUnavailableError(text)

    def _set_up(self) -> None:
        config = self._config
        host, _, port = config.master.rpartition(":")
        try:  # the engine would try for minutes, and cannot be interrupted
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise TierUnavailableError(
                f"the master of {config.url} does not answer: {error}; check that it is running and that url is correct"
            ) from error
        options = {
            "local_hostname": config.hostname,
            "metadata_server": config.metadata,
            "global_segment_size": str(config.segment_bytes),
            "local_buffer_size": str(_LEAST_BYTES),  # for calls that copy, which are not used
            "protocol": config.protocol,
            "rdma_devices": config.devices,
            "master_server_addr": config.master,
        }
        if code := self._store.setup(options):
            self._store = self._new_store()  # for the next attempt
            raise TierError(
                f"cannot join the pool of {config.url} as {config.hostname} by {config.protocol}:"
                f" {meaning(code)}; check that the master is running and that url, hostname and protocol are correct"
            )

    def _leave(self) -> None:
        if self._is_own:
            self._store.close()

    def _names(self, keys: Sequence[ChunkKey]) -> list[str]:
        return [self._config.prefix + key.hex() for key in keys]


def _engine() -> Any:
    """Import the engine on first use, because it needs system libraries that may be missing.

    Raises:
        MissingDependencyError: It cannot be loaded. The message names what to install.
    """
    try:
        from mooncake import store
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the tier mooncake needs the package {error.name}, which is not installed:"
            " pip install 'lmcache-async[mooncake]' (without CUDA: mooncake-transfer-engine-non-cuda)"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"the tier mooncake needs a system library that is missing: {error}: {_advice(str(error))}"
        ) from error
    return store


def _advice(failure: str) -> str:
    """Return the advice for an error of the dynamic loader."""
    if "libcu" in failure or "libnv" in failure:
        return (
            "without CUDA, install the package mooncake-transfer-engine-non-cuda instead of"
            " mooncake-transfer-engine"
        )
    needed = [package for library, package in _PACKAGES.items() if library in failure]
    return f"install {' '.join(needed or dict.fromkeys(_PACKAGES.values()))} (package names of Debian and Ubuntu)"


def meaning(code: int) -> str:
    """Return the description of an error code."""
    return f"{_MEANINGS.get(code, 'unknown error of the engine')} (code {code})"
