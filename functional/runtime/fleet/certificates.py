"""Certificates of one run, by which etcd knows its clients and they know it.

    python certificates.py FOLDER ADDRESS…

writes ca.pem, cert.pem and key.pem into FOLDER, an existing one that only its owner can read. One pair serves etcd and
its clients alike; the authority's own key is kept by nobody. A script for Dynamo's Python, which has `cryptography`.
"""

import datetime
import ipaddress
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
BEFORE, AFTER = datetime.timedelta(days=1), datetime.timedelta(days=365)
"""Nodes' clocks differ, and no run lasts a year."""
KEY_USAGE = x509.KeyUsage(
    key_cert_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
"""The authority signs certificates, and nothing else."""


def main(folder: Path, addresses: list[str]) -> None:
    """Write the three files, readable by their owner only."""
    authority, pair = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer, subject = _name("run"), _name("fleet")
    ca = _certificate(issuer, issuer, authority.public_key())
    own_id = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own_id)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    ca = ca.add_extension(own_id, critical=False)
    ca = ca.add_extension(KEY_USAGE, critical=True)
    hosts = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    own = _certificate(subject, issuer, pair.public_key())
    own = own.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    own = own.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    own = own.add_extension(issued_by, critical=False)
    pem = serialization.Encoding.PEM
    _write(folder / CA, ca.sign(authority, hashes.SHA256()).public_bytes(pem))
    _write(folder / CERTIFICATE, own.sign(authority, hashes.SHA256()).public_bytes(pem))
    plain, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(folder / KEY, pair.private_bytes(pem, plain, none))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - BEFORE).not_valid_after(now + AFTER)


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
