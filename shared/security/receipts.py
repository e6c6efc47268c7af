"""Receipts of purges, signed by policy with the key that signs grants, under a domain of their own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared.contracts.admin_messages import PurgeReceipt, SignedReceipt
from shared.contracts.errors import Forbidden
from shared.security.grant_signature import GrantSigner

DOMAIN = b"baton.purge-receipt.v1\x00"
"""Signed along, so that no receipt passes for a grant, nor the other way round."""


def sign_receipt(signer: GrantSigner, receipt: PurgeReceipt) -> SignedReceipt:
    """The receipt as text, with policy's signature."""
    payload = msgspec.json.encode(receipt)
    return SignedReceipt(payload.decode(), signer.sign_bytes(DOMAIN, payload).hex(), signer.key_id)


def verify_receipt(keys: Mapping[str, Ed25519PublicKey], signed: SignedReceipt) -> PurgeReceipt:
    """What policy signed. Raises Forbidden when it did not."""
    key = keys.get(signed.key_id)
    if key is None:
        raise Forbidden(f"the receipt is signed with an unknown key {signed.key_id[:32]!r}", code="receipt_invalid")
    try:
        key.verify(bytes.fromhex(signed.signature), DOMAIN + signed.payload.encode())
        return msgspec.json.decode(signed.payload, type=PurgeReceipt)
    except (InvalidSignature, ValueError, msgspec.MsgspecError) as exc:
        raise Forbidden("the receipt's signature does not hold", code="receipt_invalid") from exc
