"""Content of the deployment examples: YAML, the engine's command, and its config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.hashing import Namespace
from lmcache_async.logging import LimitedLogger
from lmcache_async.registry import Registry

EXAMPLES = Path(__file__).parents[2] / "examples"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of `--name=value`, which must occur once."""
    [value] = [argument.split("=", 1)[1] for argument in arguments if argument.startswith(f"{name}=")]
    return value


def transfer_config(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the connector settings passed to vLLM."""
    found = json.loads(option(arguments, "--kv-transfer-config"))
    assert isinstance(found, dict)
    return found


def checked(text: str, password_file: str, directory: Path, logger: LimitedLogger) -> EngineConfig:
    """Return the config, after creating every tier and layer of it like an engine.

    Args:
        text: YAML.
        password_file: Path of the password in the container; replaced by a file in `directory`.
    """
    assert text.count(password_file) == 1, f"{password_file} is where the password is mounted"
    password = directory / "password"
    password.touch(mode=0o600)
    password.write_text("secret")
    path = directory / "config.yaml"
    path.write_text(text.replace(password_file, str(password)), encoding="utf-8")
    config = load_config(path, env={})
    namespace = Namespace(model="m", weights="w", dtype="float16", layout="l", chunk_size=config.chunk_size)
    assert len(stacked_tiers(Registry(), config, namespace, logger)) == len(config.tiers)
    return config


def address(config: EngineConfig, tier: str) -> tuple[str, int]:
    """Return host and port of the tier's server."""
    [spec] = [spec for spec in config.tiers if spec.name == tier]
    parts = urlsplit(spec.options["url"])
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port
