"""Sealed bytes: what a store or a stream keeps of a tenant's texts is readable only with the master key.

AES-256-GCM under a key per tenant, derived from the master key. `place` is authenticated with the data: a sealed value
moved to another tenant or another place does not open.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shared.contracts.errors import Internal, SettingsError
from shared.contracts.ids import TenantId

VERSION = b"\x01"
KEY_BYTES = 32
NONCE_BYTES = 12
_SEALS, _MARKS = b"baton sealed v1", b"baton marks v1"


class Sealer:
    """Seals and opens under one master key.

    Raises SettingsError when the master key is not 32 bytes.
    """

    def __init__(self, master_key: bytes) -> None:
        if len(master_key) != KEY_BYTES:
            raise SettingsError(f"the master key has {len(master_key)} bytes; it must have {KEY_BYTES}")
        self._cipher = lru_cache(maxsize=1024)(lambda tenant: AESGCM(tenant_key(master_key, tenant)))
        self._mark_key = lru_cache(maxsize=1024)(lambda tenant: tenant_key(master_key, tenant, _MARKS))

    def seal(self, tenant: TenantId, place: str, data: bytes) -> bytes:
        """`data` sealed: version byte, 12-byte nonce, ciphertext with tag; 29 bytes longer."""
        nonce = os.urandom(NONCE_BYTES)
        sealed: bytes = self._cipher(tenant).encrypt(nonce, data, _associated(tenant, place))
        return VERSION + nonce + sealed

    def mark(self, tenant: TenantId, text: str) -> str:
        """32 hex characters that stand for a text where it only has to be compared; nobody without the master key can
        try what it stands for."""
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._mark_key(tenant)).hexdigest()

    def unseal(self, tenant: TenantId, place: str, sealed: bytes) -> bytes:
        """The inverse of `seal`. Raises Internal when it was altered, moved, or sealed under another key."""
        nonce, body = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        if sealed[:1] != VERSION or len(nonce) != NONCE_BYTES:
            raise Internal(f"a sealed value at {place} is not in a known form")
        try:
            opened: bytes = self._cipher(tenant).decrypt(nonce, body, _associated(tenant, place))
        except InvalidTag as exc:
            raise Internal(f"a sealed value at {place} does not open") from exc
        return opened


def tenant_key(master_key: bytes, tenant: TenantId, purpose: bytes = _SEALS) -> bytes:
    """The tenant's 256-bit key of a purpose: HKDF-SHA256 of the master key."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose + b"\x00" + tenant.encode()).derive(master_key)


def _associated(tenant: TenantId, place: str) -> bytes:
    fields = (tenant.encode(), place.encode())
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)
