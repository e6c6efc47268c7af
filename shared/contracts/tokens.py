"""Token ids on the wire: little-endian unsigned 32-bit, four bytes a token."""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Iterable

from shared.contracts.errors import ProtocolError


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32 bytes. Raises ProtocolError for an id outside [0, 2**32)."""
    try:
        packed = array.array("I", token_ids)
    except (OverflowError, TypeError) as exc:
        raise ProtocolError(f"a token id does not fit 32 bits: {exc}") from exc
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises ProtocolError when the length is not a multiple of four."""
    if len(data) == 4:  # a decode step's
        return [int.from_bytes(data, "little")]
    if len(data) % 4:
        raise ProtocolError(f"token ids take {len(data)} bytes, which is not a multiple of 4")
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def completion_checksum(token_ids: Iterable[int]) -> bytes:
    """BLAKE2b-128 over a completion's token ids, from sequence number 0 over all epochs, as `pack_tokens` writes them.

    What the ingress compares its committed tokens with.
    """
    return hashlib.blake2b(pack_tokens(token_ids), digest_size=16).digest()
