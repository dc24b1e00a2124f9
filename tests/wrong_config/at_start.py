"""Errors at start: each case starts something in a folder, and has the expected message."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_async.config import EngineConfig
from lmcache_async.daemon.address import check_directory
from lmcache_async.daemon.config import DaemonConfig, load_daemon_config
from lmcache_async.daemon.server import Daemon, shared_memory
from lmcache_async.engine.check import load_engine_config
from lmcache_async.hashing import ChunkHasher, weights_fingerprint
from lmcache_async.hashing.digest import digest_function
from lmcache_async.integration.vllm.lookup_server import socket_path
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.region import Region
from lmcache_async.plugins.cpu import CPUTier
from lmcache_async.plugins.cpu.config import CPUConfig
from lmcache_async.registry import LAYERS, TIERS
from lmcache_async.stages.decrypt import DecryptStage
from lmcache_async.stages.encrypt import EncryptStage
from lmcache_async.testing.fakes import DictTier, FakeRegistry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.middleware.base import Layer

KEY = bytes(range(32))
FAKES = FakeRegistry(tiers={"no": 3}, layers={"no": DictTier})
USER = os.getuid()
LONG = "x" * 100


def long_socket(folder: Path) -> None:
    check_directory(Path("/", LONG), make=False)


def directory_under_a_file(folder: Path) -> None:
    check_directory(folder / "key" / "kv" / "s", make=True)


def allocate_shared(nbytes: int) -> None:
    with shared_memory(nbytes, huge_pages=False, prefault=False):
        pass


def open_directory(folder: Path) -> None:
    """Open the default directory, in an $XDG_RUNTIME_DIR that others may write to."""
    (folder / "lmcache-async").mkdir()
    (folder / "lmcache-async").chmod(0o777)
    check_directory(folder / "lmcache-async" / "host.sock", make=False)


def daemon_at(path: Path) -> None:
    async def run() -> None:
        config = DaemonConfig.model_validate({"max_bytes": "16MiB", "socket": path, "prefault": False})
        async with Daemon(config):
            pass

    asyncio.run(run())


def lock_is_a_directory(folder: Path) -> None:
    (folder / "s.lock").mkdir()
    daemon_at(folder / "s")


def socket_whose_mode_cannot_be_set(folder: Path) -> None:
    """As on a file system without modes."""

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "chmod", refuse)
        daemon_at(folder / "s")


def open_base(folder: Path) -> None:
    folder.chmod(0o777)
    socket_path(folder, "engine", 0)


def open_private_directory(folder: Path) -> None:
    (folder / f"lmcache-async-{USER}").mkdir()
    (folder / f"lmcache-async-{USER}").chmod(0o755)
    socket_path(folder, "engine", 0)


def private_directory_is_a_file(folder: Path) -> None:
    (folder / f"lmcache-async-{USER}").write_text("")
    socket_path(folder, "engine", 0)


def long_base(folder: Path) -> None:
    (folder / LONG).mkdir()
    socket_path(folder / LONG, "engine", 0)


def wrong_config_and_tier(folder: Path) -> None:
    load_engine_config(env={}, extra={"chunk_size": 0, "tiers": [{"name": "cpu", "max_byte": 1}]})


AT_START: list[tuple[Callable[[Path], object], str]] = [
    (long_socket, "socket: /{long} is longer than the 100 bytes that a socket's path may have"),
    (directory_under_a_file, "socket: cannot create {dir}/key/kv: Not a directory; name a path where user {user} can create files"),
    (
        open_directory,
        "socket: {dir}/lmcache-async must be a directory of user {user} that others cannot write to; remove it, or name another socket",
    ),
    (lambda _: allocate_shared(-4096), "max_bytes: cannot allocate -4096 bytes of shared memory: choose a smaller pool"),
    (lambda _: allocate_shared(1 << 62), "max_bytes: cannot allocate 4611686018427387904 bytes of shared memory: choose a smaller pool"),
    (lock_is_a_directory, "socket: cannot create {dir}/s.lock: Is a directory; name a path where user {user} can create files"),
    (socket_whose_mode_cannot_be_set, "socket: cannot listen at {dir}/s: Operation not permitted; name a path where user {user} can create files"),
    (
        wrong_config_and_tier,
        ("kv_connector_extra_config: chunk_size is 0: expected a whole number of at least 1\n"
        "kv_connector_extra_config: tiers[0] (cpu): there is no key max_byte; did you mean max_bytes?"),
    ),
    (
        lambda _: load_daemon_config(None, {"socket": ""}),
        ("--socket: socket is '': expected the path of a socket, such as /run/kv/host.sock\n"
        "max_bytes is missing: pass --max-bytes to serve, such as --max-bytes 20GiB, or set it in the config file"),
    ),
    (
        lambda _: FAKES.load_class(TIERS, "no", Tier, where="tier no"),
        "tier no: 'no' is 3, which is not a subclass of Tier",
    ),
    (
        lambda _: FAKES.load_class(LAYERS, "no", Layer, where="here"),
        f"here: 'no' is {DictTier!r}, which is not a subclass of Layer",
    ),
    (lambda _: ChunkHasher(KEY[:16], chunk_size=1 << 25), "chunk_size is 33554432; expected 1 to 16777216 tokens"),
    (lambda _: digest_function("md5"), "hash algorithm 'md5' is unknown; expected one of xxh3_128, blake3, sha256"),
    (
        lambda _: digest_function("xxh3_128", KEY),
        "hash algorithm 'xxh3_128' does not support a key: set hash_algorithm to blake3 or sha256",
    ),
    (lambda _: digest_function("sha256", b"short"), "the hash key has 5 bytes; expected 32"),
    (
        lambda folder: weights_fingerprint(folder, mode="half"),  # type: ignore[arg-type]
        "fingerprint mode 'half' is unknown; expected sampled or full",
    ),
    (open_base, "vllm.socket_dir: {dir} has mode 0777, so other users may replace its content: remove the write permission of others (chmod o-w), set the sticky bit (chmod +t) or name another directory"),
    (open_private_directory, "vllm.socket_dir: {dir}/lmcache-async-{user} must be a directory of user {user} with mode 0700; remove it or name another directory"),
    (private_directory_is_a_file, "vllm.socket_dir: cannot make {dir}/lmcache-async-{user}: [Errno 17] File exists: '{dir}/lmcache-async-{user}'"),
    (long_base, "vllm.socket_dir: {dir}/{long}/lmcache-async-{user}/{engine}-0.sock is longer than the 100 bytes that a socket's path may have; name a shorter directory"),
    (lambda folder: socket_path(folder / "none", "e", 0), "vllm.socket_dir: {dir}/none cannot be used: No such file or directory"),
    (lambda folder: socket_path(folder / "key", "e", 0), "vllm.socket_dir: {dir}/key is not a directory"),
    (lambda _: Arena(100, 4096), "arena.max_bytes is 100, but one chunk needs 4096 bytes: raise arena.max_bytes or lower chunk_size"),
    (
        lambda _: CPUTier(CPUConfig(max_bytes=100)).bind(Arena(8192, 4096, huge_pages=False, prefault=False)),
        "the cpu tier's max_bytes is 100, but one chunk needs 4096 bytes: raise max_bytes or lower chunk_size",
    ),
    (lambda _: RecordCipher([b"short"]), "encryption needs keys of 32 bytes"),
    (
        lambda _: Region(1 << 60, grain_bytes=4096, pin=False, pin_device=None, huge_pages=False, prefault=False),
        "arena.max_bytes: cannot allocate 1152921504606846976 bytes of host memory",
    ),
    (lambda _: EncryptStage(None, None, None, EngineConfig(), None), "store.stages: encrypt has no key; set encryption.key_file"),  # type: ignore[arg-type]
    (lambda _: DecryptStage(None, None, None, EngineConfig(), None), "retrieve.stages: decrypt has no key; set encryption.key_file"),  # type: ignore[arg-type]
]  # fmt: skip
