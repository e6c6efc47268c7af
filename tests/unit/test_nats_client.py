"""What may be written past nats-py's checks: only what they would let through as it is."""

from __future__ import annotations

import pytest

from shared.bus.nats_client import DirectClient, _header_lines, _is_name


def test_headers_are_written_as_they_are_or_not_at_all() -> None:
    assert _header_lines({"a": "b", "C-d": "é: x"}) == "NATS/1.0\r\na: b\r\nC-d: é: x\r\n\r\n".encode()
    assert _header_lines({}) == b"NATS/1.0\r\n\r\n"
    for value in ("b\r\nc: d", "b\n", "\r", "b\nc"):
        assert _header_lines({"a": value}) is None
        assert _header_lines({value: "a"}) is None
    assert _header_lines({"": "a"}) is None


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "a\tb", "a\x00", "a\x7f"])
def test_a_subject_that_is_none_is_not_written(subject: str) -> None:
    assert not _is_name(subject)


async def test_nothing_is_written_without_a_connection() -> None:
    assert not DirectClient().write("a", b"x")
