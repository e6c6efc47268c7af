"""An authority and certificates of its own for tests of TLS."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Files:
    """PEM files of one worker."""

    cert: str
    key: str
    ca: str


class Authority:
    """Signs certificates for 127.0.0.1, unless another address or name is given."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        cert = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(cert.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def worker(self, name: str, address: str = "127.0.0.1", dns: str = "") -> Files:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName(dns)] if dns else [x509.IPAddress(ipaddress.ip_address(address))]
        cert = self._builder(subject, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem, private = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        pem.write_bytes(cert.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        private.chmod(0o600)
        return Files(str(pem), str(private), str(self.ca))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
        )
