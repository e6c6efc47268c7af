"""An answer's head travels with its body, but waits for none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from services.gateway.joined_head import JoinedHead

HEAD, BODY = b"HTTP/1.1 200 OK\r\n\r\n", b"text"


class Transport:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joined(*, started: bool = True) -> tuple[JoinedHead, Transport, SimpleNamespace]:
    transport, cycle = Transport(), SimpleNamespace(response_started=started)
    return JoinedHead(cast(asyncio.Transport, transport), cycle), transport, cycle


async def test_a_head_and_the_body_behind_it_are_one_write() -> None:
    out, transport, _ = joined()
    out.write(HEAD)
    assert transport.sent == []
    for _ in range(2):
        out.write(BODY)
    await asyncio.sleep(0)
    assert transport.sent == [HEAD + BODY, BODY]


async def test_a_head_alone_is_sent_in_this_turn() -> None:
    out, transport, _ = joined()
    out.write(HEAD)
    await asyncio.sleep(0)
    assert transport.sent == [HEAD]
    out.write(BODY)
    assert transport.sent == [HEAD, BODY]


async def test_what_comes_before_an_answer_goes_at_once() -> None:
    out, transport, cycle = joined(started=False)
    out.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(transport.sent) == 1
    cycle.response_started = True
    out.write(HEAD)
    out.write(BODY)
    assert transport.sent[1:] == [HEAD + BODY]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_head_is_sent_before_the_connection_closes_and_not_after(lost: bool) -> None:
    out, transport, _ = joined()
    out.write(HEAD)
    if lost:
        transport.close()
        await asyncio.sleep(0)
    else:
        out.close()
    assert transport.sent == ([] if lost else [HEAD])
    assert out.is_closing()
