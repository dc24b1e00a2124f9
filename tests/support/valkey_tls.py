"""TLS for a real server: certificates, and a TLS proxy."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """A certificate authority with PEM files in a directory."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._sign(self._name, self._key.public_key(), ca=True)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, password: bytes = b"") -> Path:
        """Issue a certificate for 127.0.0.1 and its key, in one file."""
        encryption = (
            serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        )
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key.public_key(), ca=False)
        path = self._directory / f"{name}.pem"
        path.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                encryption,
            )
        )
        return path

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


@contextlib.contextmanager
def tls_before(socket_path: Path, certificate: Path, clients: Path | None = None) -> Iterator[int]:
    """Run a proxy that accepts TLS and forwards to a Unix socket, as stunnel does.

    Args:
        socket_path: Unix socket of the server.
        certificate: Certificate of the proxy, with its key.
        clients: CA that must have signed client certificates; None to require none.

    Yields:
        The TCP port of the proxy.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients)
    context.load_cert_chain(certificate)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    started: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await _join(reader, writer, socket_path)
            finally:
                connections.discard(task)

        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        started.append(server.sockets[0].getsockname()[1])
        ready.set()
        await end.wait()
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def run() -> None:
        with contextlib.closing(loop):
            loop.set_exception_handler(lambda *_: None)  # ignore handshakes that tests make fail
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield started[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: Path) -> None:
    writers, pumps = [writer], []

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()

    try:
        there, to_server = await asyncio.open_unix_connection(path)
        writers.append(to_server)
        pumps = [asyncio.ensure_future(pump(reader, to_server)), asyncio.ensure_future(pump(there, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pumps:
            task.cancel()
        for one in writers:
            one.transport.abort()
        closed = [one.wait_closed() for one in writers]
        await asyncio.gather(*pumps, *closed, return_exceptions=True)
