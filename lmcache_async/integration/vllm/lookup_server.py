"""Lookup server of a rank, and the messages between it and the scheduler connector.

A message is a 4-byte little-endian length and a msgpack map. The scheduler sends requests, each with an `id`.
The server answers with the same `id`, in any order. `unpin` has no answer. The server sends `goodbye` before it
closes.

Only processes of the same user can connect to a Unix socket: it is in a directory of mode 0700, and the user of each
peer is checked. Over TCP both ends prove that they know the server's secret, which vLLM sends from the worker to the
scheduler. The messages after that are neither encrypted nor signed. An invalid message, or a peer that does not read
its answers, affects only its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import msgpack  # type: ignore[import-untyped]

from lmcache_async.config.values import MAX_SOCKET_PATH_BYTES, Endpoint
from lmcache_async.daemon.address import peer_of
from lmcache_async.engine.lookup import MemoryLookups
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import ALGORITHMS
from lmcache_async.integration.vllm.load_policy import pack_costs
from lmcache_async.logging import LimitedLogger
from lmcache_async.types import KEY_BYTES, MAX_CHUNK_SIZE, ChunkKey

logger = LimitedLogger(logging.getLogger(__name__))

PROTOCOL = 9
MAX_MESSAGE_BYTES = 16 << 20  # a million keys
MAX_TEXT_BYTES = 4096
_MAX_ENTRIES = 64  # of a map or a list

Message: TypeAlias = dict[str, Any]

_MAX_CONNECTIONS = 16  # one scheduler connects; the others are connections that it has lost
_MAX_REQUESTS = 256  # of one connection at the same time; more wait in its socket
_MAX_REQUEST_BYTES = 32 << 20  # the same in bytes; the last request may exceed it
_RETRY_S = 0.05
_SECRET_BYTES = 32
_PROOF_BYTES = 32
AUTHENTICATE_S = 5.0
"""Deadline for a TCP connection to be authenticated."""
LOST_PEER = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,
}
"""Options of a TCP connection, by which the kernel ends it within a minute if the host of the peer has disappeared: probes
after 30 s without data, and a deadline in milliseconds for data that is not acknowledged."""
CLOSE_S = 1.0
"""Deadline for a peer to read what it was sent before the connection was closed."""


@dataclass(frozen=True, slots=True)
class TCPAddress:
    """Address of a lookup server over TCP, with the secret that a client needs."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return str(Endpoint(self.host, self.port))


Address: TypeAlias = Path | TCPAddress
"""A Unix socket, or host and port."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Answer of a rank to `hello`: everything besides the hash key that is needed to compute the rank's keys.

    `root` is the root of the chunk keys. `group_roots` are the roots of the namespaces of the KV groups.
    """

    protocol: int
    root: bytes
    algorithm: str
    chunk_size: int
    block_size: int
    hash_key_id: str = ""
    group_roots: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, message: Message) -> Identity:
        """Read an answer to `hello`.

        Raises:
            ValueError: The protocol version differs, or a field is invalid.
        """
        if message.get("protocol") != PROTOCOL:
            raise ValueError(f"the rank uses protocol {message.get('protocol')!r:.40}, expected {PROTOCOL}")
        match message:
            case {
                "root": bytes(root),
                "algorithm": str(algorithm),
                "chunk_size": int(chunk_size),
                "block_size": int(block_size),
                "hash_key_id": str(hash_key_id),
                "group_roots": list(group_roots),
            } if (
                len(root) == KEY_BYTES
                and all(isinstance(each, bytes) and len(each) == KEY_BYTES for each in group_roots)
                and algorithm in ALGORITHMS
                and 1 <= block_size <= chunk_size <= MAX_CHUNK_SIZE
            ):
                return cls(PROTOCOL, root, algorithm, chunk_size, block_size, hash_key_id, tuple(group_roots))
        raise ValueError(f"the rank's answer to hello is invalid: {message!r:.200}")


def encode(message: Message) -> bytes:
    """Encode a message. Raises a ValueError if it is longer than `MAX_MESSAGE_BYTES`."""
    body: bytes = msgpack.packb(message, unicode_errors="backslashreplace")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(4, "little") + body


async def receive(reader: asyncio.StreamReader) -> Message:
    """Read the next message.

    Raises:
        EOFError: The peer closed the connection (as IncompleteReadError).
        ValueError: The bytes are not a message.
    """
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return _decode(await reader.readexactly(length))


def check_peer(writer: asyncio.StreamWriter) -> int:
    """Return the process id of the peer. Raises a PermissionError if it belongs to another user."""
    return _check_user(writer.get_extra_info("socket"))


def _check_user(connection: socket.socket) -> int:
    process, user = peer_of(connection)
    if user != os.geteuid():
        raise PermissionError(f"the peer's process {process} belongs to user {user}, expected {os.geteuid()}")
    return process


def detect_lost_peer(writer: asyncio.StreamWriter) -> None:
    """Let the kernel end a TCP connection whose peer has disappeared without closing it; see `LOST_PEER`."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in LOST_PEER.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a lookup server. Over TCP, check that it knows the secret.

    Raises:
        OSError: It cannot be reached, does not know the secret, or did not answer within `AUTHENTICATE_S`.
    """
    if isinstance(address, Path):
        return await asyncio.open_unix_connection(address)
    async with asyncio.timeout(AUTHENTICATE_S):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        detect_lost_peer(writer)
        await _authenticate(reader, writer, address.secret, b"client", b"server")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def close_connection(writer: asyncio.StreamWriter) -> None:
    """Close a connection. What the peer does not read within `CLOSE_S` seconds, or until a cancellation, is dropped."""
    writer.close()
    try:
        with contextlib.suppress(OSError):  # also the deadline
            async with asyncio.timeout(CLOSE_S):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, own: bytes, other: bytes
) -> None:
    """Prove to the peer that this end knows the secret, and check the peer's proof.

    Each end sends a nonce, then an HMAC-SHA256 of its name and both nonces. Nothing of variable length is read.

    Raises:
        PermissionError: The peer does not know the secret, or ended the connection.
        TimeoutError: It did not answer within `AUTHENTICATE_S`.
    """
    nonce = secrets.token_bytes(_SECRET_BYTES)
    try:
        async with asyncio.timeout(AUTHENTICATE_S):
            writer.write(nonce)
            theirs = await reader.readexactly(_SECRET_BYTES)
            writer.write(hmac.digest(secret, own + nonce + theirs, "sha256"))
            proof = await reader.readexactly(_PROOF_BYTES)
    except EOFError:
        raise PermissionError("the peer closed the connection instead of proving the secret") from None
    if not hmac.compare_digest(proof, hmac.digest(secret, other + theirs + nonce, "sha256")):
        raise PermissionError("the peer does not know the secret")


def _decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(
            body,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=len(body),
            max_array_len=_MAX_ENTRIES,
            max_map_len=_MAX_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"{len(body)} bytes are not a message: {error}") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message is a map, not a {type(message).__name__}")  # noqa: TRY004
    return message


def socket_path(base: Path | None, engine_id: str, rank: int) -> Path:
    """Path of the socket of a rank's lookup server. Scheduler and worker compute the same path.

    Args:
        base: The configured directory; None for $XDG_RUNTIME_DIR or the directory for temporary files.

    Raises:
        ConfigError: The directory cannot be used, or the path is too long for a socket.
    """
    if base is not None:
        _check_base(base)
    name = f"{sha256(engine_id.encode()).hexdigest()[:16]}-{rank}.sock"
    path = _private_directory(base or _default_base()) / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"vllm.socket_dir: {path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a socket's path may have; "
            f"name a shorter directory"
        )
    return path


def _default_base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())


def _check_base(base: Path) -> None:
    try:
        mode = base.stat().st_mode
    except OSError as error:
        raise ConfigError(f"vllm.socket_dir: {base} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"vllm.socket_dir: {base} is not a directory")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"vllm.socket_dir: {base} has mode {stat.S_IMODE(mode):04o}, so other users may replace its content:"
            " remove the write permission of others (chmod o-w), set the sticky bit (chmod +t) or name another directory"
        )


def _private_directory(base: Path) -> Path:
    path = base / f"lmcache-async-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"vllm.socket_dir: cannot make {path}: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"vllm.socket_dir: {path} must be a directory of user {os.getuid()} with mode 0700; "
            f"remove it or name another directory"
        )
    return path


def unpack_keys(packed: bytes) -> list[ChunkKey]:
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of keys")
    return [ChunkKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]


def pack_runs(runs: Sequence[bytes]) -> list[bytes]:
    """Pack runs of keys as two byte strings: all keys, and the number of keys of each run (uint16)."""
    counts = [len(run) // KEY_BYTES for run in runs]
    return [b"".join(runs), struct.pack(f"<{len(runs)}H", *counts)]


def unpack_runs(packed: object) -> list[Sequence[ChunkKey]]:
    """Read runs of keys. A run is empty where chunked local attention needs nothing to continue.

    Raises:
        ValueError: The value is not the result of `pack_runs`.
    """
    match packed:
        case [bytes(packed_keys), bytes(packed_counts)] if len(packed_counts) % 2 == 0:
            keys = unpack_keys(packed_keys)
            counts = struct.unpack(f"<{len(packed_counts) // 2}H", packed_counts)
            if sum(counts) == len(keys):
                ends = accumulate(counts)
                return [keys[end - count : end] for count, end in zip(counts, ends, strict=True)]
    raise ValueError(f"{packed!r:.80} are not runs of keys")


class Lookups(Protocol):
    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> Any: ...

    async def first_present(
        self, runs: Sequence[Sequence[ChunkKey]], *, lookup_id: str | None = None
    ) -> Any: ...


class Engine(Lookups, Protocol):
    def unpin(self, lookup_id: str) -> None: ...


class LookupServer:
    """Serves `hello`, `lookup`, `first`, `unpin` and `clear` on a Unix socket or over TCP.

    `address` is the path of the socket, or the host to listen on over TCP. `clear` is called with the new epoch and
    whether only memory is cleared. `memory` returns a lookup in host memory that any thread may use. `tcp_address` is
    set when the server is started over TCP.
    """

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        address: Path | str,
        *,
        clear: Callable[[int, bool], Awaitable[int]],
        memory: Callable[[], MemoryLookups | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self.memory = memory
        self._identity = identity
        self._address = address
        self._secret = b"" if isinstance(address, Path) else secrets.token_bytes(_SECRET_BYTES)
        self.tcp_address: TCPAddress | None = None
        self._clear = clear
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        # Connections that have not proved the secret, oldest first.
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._running: Counter[str] = Counter()  # lookups that may still pin
        self._closing = False
        self._released: set[str] = set()  # lookups in `_running` that were released meanwhile

    async def start(self, *, wait_s: float = 5.0) -> None:
        """Start to listen. Wait up to `wait_s` seconds for an earlier process to close its socket.

        Raises:
            ConfigError: A running process listens there, or the socket cannot be created.
        """
        if isinstance(self._address, str):
            await self._start_tcp(self._address)
        else:
            await self._start_unix(self._address, wait_s)

    async def _start_tcp(self, host: str) -> None:
        try:
            self._server = await asyncio.start_server(self.accept, host, 0)
        except OSError as error:
            raise ConfigError(
                f"vllm.lookup_transport: cannot listen at {host}: {error}; set VLLM_HOST_IP to an address of this host"
            ) from error
        self.tcp_address = TCPAddress(host, self._server.sockets[0].getsockname()[1], self._secret)

    async def _start_unix(self, path: Path, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while (process := _listener(path)) is not None:
            if time.monotonic() >= deadline:
                name = f"process {process}" if process else "another process"
                raise ConfigError(
                    f"kv_transfer_config.engine_id: {name} serves {path} already;"
                    " give each vLLM a separate engine_id, or none"
                )
            await asyncio.sleep(_RETRY_S)
        try:
            path.unlink(missing_ok=True)  # noqa: ASYNC240 - left by a killed process
            self._server = await asyncio.start_unix_server(self.accept, path)
            path.chmod(0o600)  # noqa: ASYNC240
        except OSError as error:
            raise ConfigError(f"vllm.socket_dir: cannot listen at {path}: {error}") from error

    async def aclose(self) -> None:
        if self._server is None:
            return
        if isinstance(self._address, Path):
            # Before closing, because afterwards another process may create a socket at this path.
            self._address.unlink(missing_ok=True)
        self._closing = True
        self._server.close()
        self._send_goodbyes()
        connections = list(self._connections)  # each is a task, so that it can be cancelled
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection. Called by the server that `start` opens."""
        if self._closing:  # accepted by the loop before it was closed
            writer.close()
            return
        try:
            if isinstance(self._address, Path):
                check_peer(writer)
            else:
                detect_lost_peer(writer)
            if len(self._connections) >= _MAX_CONNECTIONS:
                self._end_unproven()
        except OSError as error:
            logger.report(type(error).__name__, "lookup server: connection refused: %s", error)
            writer.close()
            return
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self._connections[task] = writer
        if self._secret:
            self._unproven[task] = None
        task.add_done_callback(self._connection_ended)

    def _end_unproven(self) -> None:
        """End the oldest connection that has not proved the secret, so that others on the network cannot occupy all.

        Raises:
            ConnectionRefusedError: There is none.
        """
        if not self._unproven:
            raise ConnectionRefusedError(f"{_MAX_CONNECTIONS} connections are open already")
        oldest = next(iter(self._unproven))
        del self._unproven[oldest]
        oldest.cancel()

    def _connection_ended(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._connections.pop(task).close()

    def _send_goodbyes(self) -> None:
        """Tell clients that the server closes, because workers stop before the scheduler."""
        for writer in self._connections.values():
            if not writer.is_closing():
                writer.write(encode({"op": "goodbye"}))

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backlog = Backlog()
        try:
            if self._secret:
                await _authenticate(reader, writer, self._secret, b"server", b"client")
                self._unproven.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
            async with asyncio.TaskGroup() as group:
                while True:
                    await backlog.wait_below_limit()
                    message = await receive(reader)
                    task = group.create_task(self._serve(message, writer))
                    task.add_done_callback(
                        partial(self._served, backlog, backlog.add(message), self._claim(message))
                    )
                    del message
        except* (EOFError, ConnectionError):
            pass  # the scheduler closed the connection
        except* Exception as error:  # noqa: BLE001 - an invalid message ends only its connection
            logger.report("connection", "lookup server: connection closed: %s", error.exceptions[0])
        finally:
            await close_connection(writer)

    async def _serve(self, message: Message, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(message)
        except Exception as error:  # noqa: BLE001 - a failure here is a miss there
            text = f"{error!r:.200}"
            logger.report(type(error).__name__, "lookup server: a request failed: %s", text)
            answer = {"error": text}
        if answer is not None and not writer.is_closing():
            message_id = message.get("id")
            writer.write(encode({"id": message_id if isinstance(message_id, int) else None, **answer}))
            await writer.drain()  # a peer that does not read is not served further

    async def _answer(self, message: Message) -> Message | None:
        match message:
            case {"op": "unpin", "lookup_id": str(lookup_id)}:
                self._unpin(lookup_id)
                return None
            case {"op": "clear", "epoch": int(epoch), "memory_only": bool(memory_only)}:
                return {"removed": await self._clear(epoch, memory_only)}
            case {"op": "hello"}:
                return asdict(self._identity)
        return await answer_lookup(message, self._engine)

    def _claim(self, message: Message) -> str | None:
        """Return the lookup id for which the message may pin chunks. Its `unpin` may be served before the message."""
        match message:
            case {"op": "lookup" | "first", "lookup_id": str(lookup_id)}:
                self._running[lookup_id] += 1
                return lookup_id
        return None

    def _served(self, backlog: Backlog, nbytes: int, lookup_id: str | None, _: object) -> None:
        """Record that a message was answered or cancelled. Unpin if its lookup was released meanwhile."""
        backlog.remove(nbytes)
        if lookup_id is None:
            return
        self._running[lookup_id] -= 1
        if not self._running[lookup_id]:
            del self._running[lookup_id]
            if lookup_id in self._released:
                self._released.discard(lookup_id)
                self._engine.unpin(lookup_id)

    def _unpin(self, lookup_id: str) -> None:
        if lookup_id in self._running:
            self._released.add(lookup_id)
        else:
            self._engine.unpin(lookup_id)


async def answer_lookup(message: Message, lookups: Lookups) -> Message:
    """Answer a `lookup` or `first`. If `lookups` is a `MemoryLookups`, it does not suspend and any thread may call it."""
    match message:
        case {"op": "lookup", "lookup_id": str(lookup_id), "keys": bytes(keys), "runs": list(runs)}:
            return await _prefix(lookups, lookup_id, unpack_keys(keys), list(map(unpack_runs, runs)))
        case {"op": "first", "lookup_id": str(lookup_id), "runs": list(runs)}:
            return {"found": await _first(lookups, lookup_id, list(map(unpack_runs, runs)))}
    raise ValueError(f"unknown message of protocol {PROTOCOL}: {message.get('op')!r:.40}")


async def _prefix(
    lookups: Lookups,
    lookup_id: str,
    keys: list[ChunkKey],
    alternatives: list[list[Sequence[ChunkKey]]],
) -> Message:
    """Return the number of stored leading keys. `alternatives` are looked up only if every leading key is stored."""
    result = await lookups.lookup_keys(keys, lookup_id=lookup_id)
    whole = result.count == len(keys)
    return {
        "count": result.count,
        "pinned": result.pinned,
        "tiers": dict(result.by_tier),
        "costs": pack_costs(result.costs),
        "found": await _first(lookups, lookup_id, alternatives if whole else [[]] * len(alternatives)),
    }


async def _first(
    lookups: Lookups, lookup_id: str, alternatives: list[list[Sequence[ChunkKey]]]
) -> list[list[int | str]]:
    """For each list of runs, the position of the first run that is stored, -1 for none, its pinned records and its tier."""
    answers: list[list[int | str]] = []
    for runs in alternatives:
        found = await lookups.first_present(runs, lookup_id=lookup_id or None) if runs else None
        answers.append([-1, 0, ""] if found is None else [found.position, found.pinned, found.tier])
    return answers


class Backlog:
    """Unanswered requests of one connection."""

    def __init__(self) -> None:
        self._requests = 0
        self._bytes = 0
        self._reduced = asyncio.Event()

    def add(self, message: Message) -> int:
        nbytes = _num_bytes(list(message.values()))
        self._requests += 1
        self._bytes += nbytes
        return nbytes

    def remove(self, nbytes: int) -> None:
        self._requests -= 1
        self._bytes -= nbytes
        self._reduced.set()

    async def wait_below_limit(self) -> None:
        while self._requests >= _MAX_REQUESTS or self._bytes >= _MAX_REQUEST_BYTES:
            self._reduced.clear()
            await self._reduced.wait()


def _num_bytes(value: object) -> int:
    """Return the length of all byte strings in a value of a message."""
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, bytes) else 0


def _listener(path: Path) -> int | None:
    """Return the id of the process that listens on `path`, 0 if it is not known; None if there is none."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            connection.connect(str(path))
            process = _check_user(connection)
        if process:  # 0 means another PID namespace, so it is running
            os.kill(process, 0)
    except BlockingIOError:
        return 0  # it accepts no connections now
    except OSError:
        # The socket has no listener, the process has ended and only its children hold the socket, or the listener belongs
        # to another user. The directory is private, so the path may be used.
        return None
    return process
