"""Log-probabilities on the wire: of each token its own as float32, then n pairs of (id as u32, float32), little-endian.

They are natural logarithms of the model's distribution, before temperature, penalties, biases and filters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shared.contracts.errors import ProtocolError

_NO_ID = 0xFFFFFFFF


class TokenLogprob(NamedTuple):
    """Of one token: its own, and the most likely (token id, log-probability) at its place, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def pack_logprobs(entries: Sequence[TokenLogprob], top: int) -> bytes:
    """`entries` with room for `top` pairs each; one that has fewer is filled up."""
    layout = struct.Struct("<f" + "If" * top)
    filler = ((_NO_ID, 0.0),)
    return b"".join(
        layout.pack(entry.logprob, *(x for pair in (*entry.top, *filler * (top - len(entry.top))) for x in pair))
        for entry in entries
    )


def unpack_logprobs(data: bytes, count: int) -> list[TokenLogprob]:
    """The inverse for `count` tokens; [] when there are no data. Raises ProtocolError when the length does not fit."""
    if not data:
        return []
    if count < 1 or len(data) % count or (len(data) // count) % 8 != 4:
        raise ProtocolError(f"{len(data)} bytes of log-probabilities do not fit {count} tokens")
    pairs = (len(data) // count) // 8
    return [
        TokenLogprob(values[0], tuple((i, x) for i, x in zip(values[1::2], values[2::2], strict=True) if i != _NO_ID))
        for values in struct.iter_unpack("<f" + "If" * pairs, data)
    ]


def cut_logprobs(data: bytes, count: int, first: int, end: int) -> bytes:
    """The part of packed `data` of `count` tokens that belongs to tokens [first, end)."""
    width = len(data) // count if count else 0
    return data[first * width : end * width]
