"""The digest that proves a span of KV arrived whole: the right bytes, of the right attempt, in the right place."""

from __future__ import annotations

import struct

import xxhash

from shared.contracts.attempt import Attempt

DIGEST_BYTES = 16
_NUMBERS = struct.Struct("<6q")
_SUMS = struct.Struct("<2Q")


def span_digest(
    span: bytes | bytearray | memoryview, attempt: Attempt, group: int, generation: int, position: int
) -> bytes:
    """XXH3-128 over the whole of `span`, with what the bytes are for mixed in behind them.

    Not a secret and no proof against forgery: it catches a torn, stale or misplaced copy.

    Args:
        span: all bytes of one block, as they lie in the pool; not copied.
        attempt: the attempt the block is handed over for.
        group: index of the layer group.
        generation: the block's generation in the *source* pool when it was committed.
        position: index of the block in the sequence's block table.

    Returns:
        16 bytes.
    """
    state = xxhash.xxh3_128()
    state.update(span)
    request_id = attempt.request_id.encode()
    state.update(request_id)
    # of fixed size and last, with the id's length: no two different inputs give the same bytes
    state.update(_NUMBERS.pack(attempt.epoch, attempt.dispatch, group, generation, position, len(request_id)))
    return state.digest()


def sums_digest(sums: tuple[int, int], attempt: Attempt, group: int, generation: int, position: int) -> bytes:
    """The same for a span on a GPU, of the two sums that are taken of it there (`kernels.store_kv.digest`)."""
    return span_digest(_SUMS.pack(*sums), attempt, group, generation, position)
