"""Certificates for tests of TLS."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

CA_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


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

    def server_context(self, *, require_client: bool = False) -> ssl.SSLContext:
        """Return the context of a server with a certificate of this authority."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.file)
        context.load_cert_chain(self.issue("server"))
        if require_client:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

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
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )
        if ca:
            builder = builder.add_extension(CA_USAGE, critical=True)
        else:
            authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            builder = builder.add_extension(authority, critical=False)
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())
