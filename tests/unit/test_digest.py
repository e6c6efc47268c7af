"""The span digest tells apart everything a hand-off can get wrong."""

from __future__ import annotations

import pytest

from shared.contracts.attempt import Attempt
from shared.contracts.ids import Dispatch, Epoch, RequestId
from shared.kv.digest import DIGEST_BYTES, span_digest

SPAN = bytes(range(256)) * 64


def attempt(request: str = "req-1", epoch: int = 1, dispatch: int = 1) -> Attempt:
    return Attempt(RequestId(request), Epoch(epoch), Dispatch(dispatch))


def test_digest_is_stable_across_buffer_types() -> None:
    whole = span_digest(SPAN, attempt(), 0, 3, 5)
    assert len(whole) == DIGEST_BYTES
    assert (
        whole == span_digest(bytearray(SPAN), attempt(), 0, 3, 5) == span_digest(memoryview(SPAN), attempt(), 0, 3, 5)
    )


def test_golden() -> None:
    # pinned: two builds that differ here must not hand blocks to each other
    assert span_digest(SPAN, attempt(), 0, 3, 5).hex() == "a0b90e72f3fb80e5d4d01bfaf9a9f24a"


@pytest.mark.parametrize("byte", [0, 1, 8191, len(SPAN) - 1])
def test_every_byte_counts(byte: int) -> None:
    torn = bytearray(SPAN)
    torn[byte] ^= 1
    assert span_digest(torn, attempt(), 0, 3, 5) != span_digest(SPAN, attempt(), 0, 3, 5)


def test_what_the_bytes_are_for_counts() -> None:
    variants = [
        span_digest(SPAN, attempt(), 0, 3, 5),
        span_digest(SPAN, attempt(request="req-2"), 0, 3, 5),
        span_digest(SPAN, attempt(epoch=2), 0, 3, 5),
        span_digest(SPAN, attempt(dispatch=2), 0, 3, 5),
        span_digest(SPAN, attempt(), 1, 3, 5),
        span_digest(SPAN, attempt(), 0, 4, 5),
        span_digest(SPAN, attempt(), 0, 3, 6),
        span_digest(SPAN[:-1], attempt(), 0, 3, 5),
        span_digest(SPAN[:-1], attempt(request=SPAN[-1:].decode("latin-1") + "req-1"), 0, 3, 5),
    ]
    assert len(set(variants)) == len(variants)
