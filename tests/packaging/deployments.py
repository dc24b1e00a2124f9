"""Content of the deployment examples: YAML, the engine's command, and its config."""

from __future__ import annotations

import json
import logging
import re
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


SECRET = re.compile(r"/run/secrets/[a-z/_-]+|/etc/ssl/[a-z-]+\.pem")


def written(text: str, directory: Path) -> Path:
    """Return a file of the text with secrets of this machine and with writable cache directories."""

    def secret(match: re.Match[str]) -> str:
        file = directory / Path(match[0]).name
        file.touch(mode=0o600)
        file.write_text("5a" * 32)
        return str(file)

    path = directory / "config.yaml"
    path.write_text(SECRET.sub(secret, text).replace("/var/cache", str(directory)), encoding="utf-8")
    return path


def checked(text: str, directory: Path) -> EngineConfig:
    """Return the config of the text, after creating every tier and layer of it like an engine."""
    config = load_config(written(text, directory), env={})
    namespace = Namespace(model="m", weights="w", dtype="float16", layout="l", chunk_size=config.chunk_size)
    made = stacked_tiers(Registry(), config, namespace, LimitedLogger(logging.getLogger(__name__)))
    assert [stacked.id for stacked in made] == [tier.id for tier in config.tiers]
    return config


def address(config: EngineConfig, tier: str) -> tuple[str, int]:
    """Return host and port of the tier's server."""
    [spec] = [spec for spec in config.tiers if spec.name == tier]
    parts = urlsplit(spec.options["url"])
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port
