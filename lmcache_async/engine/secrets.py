"""What the config's secrets do to an engine: the cipher, the stages that use it, and the check of the hash key."""

from __future__ import annotations

import logging

from lmcache_async.config import EngineConfig
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace, hash_key_id
from lmcache_async.memory.encryption import RecordCipher

logger = logging.getLogger(__name__)


def open_cipher(config: EngineConfig) -> RecordCipher | None:
    """The cipher of the configured keys; None where encryption is off.

    Raises:
        ConfigError: The keys cannot be read.
        MissingDependencyError: The package cryptography is not installed.
    """
    if not config.encryption.enabled:
        return None
    cipher = RecordCipher(config.encryption.read_keys())
    if not config.read_hash_key():
        logger.warning(
            "encryption is on (key %s), but chunk keys, by which tiers name records, are made without a secret: who sees"
            " names can confirm a guess of a whole prompt; set hash_key_file and hash_algorithm",
            cipher.key_id,
        )
    return cipher


def store_stages(config: EngineConfig) -> tuple[str, ...]:
    """The store chain's stages, `encrypt` among them where encryption is on."""
    return _with("encrypt", "write", config.store.stages, "store.stages", config)


def retrieve_stages(config: EngineConfig) -> tuple[str, ...]:
    """The retrieve chain's stages, `decrypt` among them where encryption is on."""
    return _with("decrypt", "verify", config.retrieve.stages, "retrieve.stages", config)


def check_hash_key(config: EngineConfig, namespace: Namespace) -> None:
    """Refuse a namespace that leaves out the configured hash key: its keys would not be secret.

    Raises:
        ConfigError: They differ.
    """
    if config.read_hash_key() != namespace.hash_key:
        found = hash_key_id(namespace.hash_key) or "none"
        raise ConfigError(
            f"hash_key: the namespace was made with another hash key ({found}) than the configured one:"
            " give it hash_key=config.read_hash_key()"
        )


def _with(
    stage: str, before: str, stages: tuple[str, ...], where: str, config: EngineConfig
) -> tuple[str, ...]:
    if not config.encryption.enabled or stage in stages:
        return stages
    if before not in stages:
        raise ConfigError(
            f"{where}: encryption is on, but there is neither {stage!r} nor {before!r} among them"
        )
    place = stages.index(before)
    return (*stages[:place], stage, *stages[place:])
