"""A certificate authority of a cluster's own, and the certificates that it signs for servers.

Keys are on the curve P-256. A server's certificate names every host name and address that clients may reach the
server by (its subject alternative names), as Python, Chromium and Go ask for.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: Days for which an authority's and a server's certificate are good. Browsers refuse a server's that is longer.
AUTHORITY_DAYS, SERVER_DAYS = 3650, 825


#: Days before its end from which on a certificate is to be renewed.
RENEWAL_DAYS = 14


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A certificate and its private key, both PEM; the key has no password."""

    certificate: bytes
    key: bytes


def new_authority(name: str) -> KeyPair:
    """An authority under this name, which signs certificates of servers alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named(name), _named(name), key.public_key(), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return KeyPair(certificate=_pem(builder.sign(key, hashes.SHA256())), key=_private(key))


def signed(authority: KeyPair, name: str, hosts: Sequence[str]) -> KeyPair:
    """A server's certificate under this name, signed by an authority.

    Args:
        authority: a pair of `new_authority`.
        name: the server's common name.
        hosts: the host names and IP addresses that clients reach the server by.

    Raises:
        ValueError: the authority's pair cannot be read, or a host's name is not ASCII.
    """
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey) or issuer_key.public_key() != issuer.public_key():
        raise ValueError("the authority's key is not that of its certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named(name), issuer.subject, key.public_key(), SERVER_DAYS)
    for extension, critical in (
        (x509.SubjectAlternativeName([_host(host) for host in hosts]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return KeyPair(certificate=_pem(builder.sign(issuer_key, hashes.SHA256())), key=_private(key))


def hosts_of(certificate: bytes) -> tuple[str, ...]:
    """The hosts that a certificate (PEM) is for. Raises ValueError where it cannot be read."""
    try:
        extension = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in extension.value)


def expiry_of(certificate: bytes) -> datetime.datetime:
    """The last moment of a certificate (PEM), in UTC. Raises ValueError where it cannot be read."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def renewal_due(certificate: bytes) -> str:
    """Why a server's certificate is to be renewed, with the remedy; empty while it is good for longer than
    `RENEWAL_DAYS`. Raises ValueError where it cannot be read."""
    end = expiry_of(certificate)
    days = (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)
    if days >= RENEWAL_DAYS:
        return ""
    how = f"expires in {days:.0f} days" if days > 0 else "has expired, and no client trusts it"
    return f"{how} ({end:%Y-%m-%d}): sign a new one by 'elasticd security renew', then reload the server"


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # for machines whose clock is behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def revoked_serials(lists: bytes, authorities: bytes) -> frozenset[int]:
    """The serial numbers on revocation lists (CRL).

    Args:
        lists: one list or several, PEM.
        authorities: the certificates, PEM, of one of which each list must be.

    Raises:
        ValueError: the lists cannot be read, or one is of no such authority.
    """
    blocks = re.findall(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", lists, re.DOTALL)
    if not blocks:
        raise ValueError("it has no revocation list in PEM, as 'openssl ca -gencrl' writes")
    issuers = x509.load_pem_x509_certificates(authorities)
    serials: set[int] = set()
    for block in blocks:
        crl = x509.load_pem_x509_crl(block)
        if not any(_signed_by(crl, issuer) for issuer in issuers):
            raise ValueError(f"no CA in client_ca has signed the list of {crl.issuer.rfc4514_string()}")
        serials.update(revoked.serial_number for revoked in crl)
    return frozenset(serials)


def _signed_by(crl: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    key = issuer.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey):
        return False
    return crl.issuer == issuer.subject and crl.is_signature_valid(key)
