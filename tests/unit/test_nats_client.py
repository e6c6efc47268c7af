"""What may be written past nats-py's checks: only what they would let through as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nats.aio.transport import TcpTransport

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


class Gone:
    """A socket's transport between its end and the client's hearing of it, as uvloop's is."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")


async def test_a_connection_that_was_just_lost_is_not_written_to() -> None:
    client, transport = DirectClient(), TcpTransport()
    transport._io_writer = SimpleNamespace(transport=Gone())  # type: ignore[assignment]
    client._transport, client._status = transport, DirectClient.CONNECTED
    assert not client.write("a", b"x")
    assert not client.write_at_once("a", b"x")
