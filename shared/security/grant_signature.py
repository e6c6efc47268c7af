"""Grants are signed by policy (Ed25519), so that index and workers need not trust whoever hands them one."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shared.contracts.errors import Forbidden, ProtocolError, SettingsError
from shared.contracts.grants import Grant, SignedGrant
from shared.contracts.message import decode, encode
from shared.store.secrets import read_secret

DOMAIN = b"baton.grant.v1\x00"
"""Signed along, so that a signature over something else can never pass for a grant."""
_PEM_END = b"-----END PUBLIC KEY-----"


def key_id_of(key: Ed25519PublicKey) -> str:
    """The name of a key: 16 hex digits of its own hash, so that it needs no register."""
    return hashlib.blake2b(key.public_bytes_raw(), digest_size=8).hexdigest()


class GrantSigner:
    """Signs grants. Only policy holds one.

    Args:
        key: the private key; `from_file` reads it.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key()
        self.key_id = key_id_of(self.public_key)

    @classmethod
    def from_file(cls, path: Path) -> GrantSigner:
        """A signer of the PEM (PKCS 8) in a 0600 file.

        Raises SettingsError when it is missing, open to others, or no Ed25519 key.
        """
        try:
            key = serialization.load_pem_private_key(read_secret(path), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
            raise SettingsError(f"{path} holds no private key in PEM", param=str(path)) from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise SettingsError(f"{path} holds a key that is not Ed25519", param=str(path))
        return cls(key)

    def sign(self, grant: Grant) -> SignedGrant:
        """The grant with its signature."""
        payload = encode(grant)
        return SignedGrant(payload=payload, signature=self.sign_bytes(DOMAIN, payload), key_id=self.key_id)

    def sign_bytes(self, domain: bytes, payload: bytes) -> bytes:
        """The signature over something that is not a grant, of a domain of its own."""
        return self._key.sign(domain + payload)


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """The PEM `GrantSigner.from_file` reads; to be written with `secrets.write_private`."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_pem(key: Ed25519PublicKey) -> bytes:
    """The PEM `load_public_keys` reads."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_public_keys(path: Path) -> dict[str, Ed25519PublicKey]:
    """Every public key of a file of PEM blocks (the current one, and older ones while their grants live), by key id.

    Raises SettingsError when the file is missing, holds none or holds a key that is not Ed25519.
    """
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise SettingsError(f"the grant verification keys cannot be read: {exc}", param=str(path)) from exc
    keys = [_public_key(block + _PEM_END, path) for block in text.split(_PEM_END)[:-1]]
    if not keys:
        raise SettingsError(f"{path} holds no public key in PEM", param=str(path))
    return by_id(keys)


def by_id(keys: Iterable[Ed25519PublicKey]) -> dict[str, Ed25519PublicKey]:
    """Public keys under their ids."""
    return {key_id_of(key): key for key in keys}


def _public_key(block: bytes, path: Path) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(block)
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise SettingsError(f"{path} holds a broken public key", param=str(path)) from exc
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError(f"{path} holds a key that is not Ed25519", param=str(path))
    return key


class GrantVerifier:
    """Tells policy's grants from anything else.

    Args:
        keys: public keys by key id.
        cache_size: verified grants remembered; a request's grant passes here many times.
    """

    def __init__(self, keys: Mapping[str, Ed25519PublicKey], cache_size: int = 4096) -> None:
        self._keys = dict(keys)
        self._cache_size = cache_size
        self._verified: OrderedDict[SignedGrant, Grant] = OrderedDict()

    def verify(self, signed: SignedGrant, now_wall: float) -> Grant:
        """The grant, if policy signed it and it has not expired at `now_wall` (unix seconds). Raises Forbidden."""
        grant = self.verify_signature(signed)
        if now_wall >= grant.expires_s:
            raise Forbidden("the grant has expired", code="grant_expired")
        return grant

    def verify_signature(self, signed: SignedGrant) -> Grant:
        """The grant, if policy signed it, expired or not: for settlements, which may be late. Raises Forbidden."""
        cached = self._verified.get(signed)
        if cached is not None:
            self._verified.move_to_end(signed)
            return cached
        grant = self._open(signed)
        self._verified[signed] = grant
        if len(self._verified) > self._cache_size:
            self._verified.popitem(last=False)
        return grant

    def _open(self, signed: SignedGrant) -> Grant:
        key = self._keys.get(signed.key_id)
        if key is None:
            raise Forbidden("the grant is signed with an unknown key", code="grant_invalid")
        try:
            key.verify(signed.signature, DOMAIN + signed.payload)
        except InvalidSignature as exc:
            raise Forbidden("the grant's signature does not hold", code="grant_invalid") from exc
        try:
            grant: Grant = decode(signed.payload, Grant)
        except ProtocolError as exc:
            raise Forbidden("the grant does not decode", code="grant_invalid") from exc
        if not grant.tenant or grant.scope.tenant != grant.tenant:
            raise Forbidden("the grant's scope is not of its tenant", code="grant_invalid")
        return grant
