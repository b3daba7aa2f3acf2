"""Certificates for tests: an authority of its own, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Paths of a certificate and its key, both PEM."""

    cert: str
    key: str


class Authority:
    """Signs what it is asked to; `ca` is the path of its own certificate."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = str(folder / f"{name}.ca.pem")
        _write(self.ca, made.sign(self._key, hashes.SHA256()))

    def server(self, name: str = "server", days: float = 1) -> Pair:
        """For 127.0.0.1 and localhost, and good for so many days from now on (below 0: it has expired)."""
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        return self._pair(name, [(NameOID.COMMON_NAME, name)], names, days)

    def client(self, name: str, *units: str) -> Pair:
        """With its common name, and organizational units."""
        return self._pair(
            name, [(NameOID.COMMON_NAME, name), *((NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units)]
        )

    def revoked(self, *pairs: Pair) -> str:
        """The path of its revocation list with these certificates on it."""
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        made = made.last_update(now).next_update(now + datetime.timedelta(days=1))
        for pair in pairs:
            serial = x509.load_pem_x509_certificate(Path(pair.cert).read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            made = made.add_revoked_certificate(entry)
        path = Path(f"{self.ca}.crl")
        path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return str(path)

    def _pair(
        self,
        file: str,
        subject: list[tuple[x509.ObjectIdentifier, str]],
        names: list[x509.GeneralName] | None = None,
        days: float = 1,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(kind, value) for kind, value in subject])
        made = _builder(name, self._name, key, days)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pair = Pair(cert=str(self._folder / f"{file}.pem"), key=str(self._folder / f"{file}.key"))
        _write(pair.cert, made.sign(self._key, hashes.SHA256()))
        Path(pair.key).touch(mode=0o600)
        Path(pair.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float = 1
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _write(path: str, certificate: x509.Certificate) -> None:
    Path(path).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
