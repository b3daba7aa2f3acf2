"""The identities of agents: a key for as long as an agent runs, and its certificate in the store."""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, kw_only=True)
class TlsIdentity:
    """This agent's key and certificate (both PEM)."""

    certificate: str
    key: bytes

    @classmethod
    def make(cls, agent: str) -> TlsIdentity:
        """For the agent of this name, at most 64 characters, that no other agent has."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, agent)])
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + 3650 * day)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = certificate.public_bytes(serialization.Encoding.PEM).decode()
        return cls(certificate=public, key=private)

    def context(self, *, server: bool, peers: str) -> ssl.SSLContext:
        """Trusts exactly the certificates in `peers` (PEM, one behind the other)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if peers:
            context.load_verify_locations(cadata=peers)
        fd = os.memfd_create("elasticd-identity", os.MFD_CLOEXEC)  # ssl reads keys from files alone
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(self.key + self.certificate.encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context
