"""What the server sends is cut into commands, however it is cut into pieces on its way, and in order."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.bus.nats_reading import MAX_LINE_BYTES, DirectReader, Malformed

Told = tuple[int, bytes, bytes, bytes, bytes]
HEADERS = b"NATS/1.0\r\na: b\r\n\r\n"
SENT = b"".join(
    (
        b"MSG a.b 1 5\r\nhello\r\n",
        b"PING\r\n",
        b"MSG a.b 1 _INBOX.x 4\r\n\r\n\r\n\r\n",  # a payload that looks like ends of lines
        b"HMSG c 2 %d %d\r\n%sMSG x 9 1\r\n" % (len(HEADERS), len(HEADERS) + 9, HEADERS),
        b"MSG js 7 3\r\nabc\r\n",
        b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
        b"HMSG c 2 _INBOX.y %d %d\r\n%s\r\n" % (len(HEADERS), len(HEADERS), HEADERS),
        b"MSG a\x0b3 1 2\r\nhi\r\n",  # one subject, not two words
        b"MSG a.b 1 0\r\n\r\n",
    )
)
TOLD: list[Told | bytes] = [
    (1, b"a.b", b"", b"", b"hello"),
    b"PING\r\n",
    (1, b"a.b", b"_INBOX.x", b"", b"\r\n\r\n"),
    (2, b"c", b"", HEADERS, b"MSG x 9 1"),
    b"MSG js 7 3\r\nabc\r\n",
    b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
    (2, b"c", b"_INBOX.y", HEADERS, b""),
    (1, b"a\x0b3", b"", b"", b"hi"),
    (1, b"a.b", b"", b"", b""),
]


class Writing:
    """The protocol that was on the socket before."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def pause_writing(self) -> None:
        self.heard.append("pause")

    def resume_writing(self) -> None:
        self.heard.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append("lost")


async def told_of(pieces: list[bytes]) -> list[Told | bytes]:
    """What is told when the server's bytes come in these pieces and the connection then ends."""
    told: list[Told | bytes] = []

    def take(sid: int, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bool:
        if sid == 7:
            return False
        told.append((sid, subject, reply, headers, payload))
        return True

    reader = DirectReader(Writing(), take)

    async def read() -> None:
        while True:
            command = await reader.command()
            await asyncio.sleep(0)  # nothing behind it may be told meanwhile
            told.append(command)

    reading = asyncio.create_task(read())
    for piece in pieces:
        reader.data_received(piece)
        if random.Random(piece).random() < 0.5:
            await asyncio.sleep(0)
    reader.connection_lost(None)
    with pytest.raises(EOFError):
        await reading
    return told


async def test_every_cut_gives_the_same_commands_in_order() -> None:
    assert await told_of([SENT]) == TOLD
    assert await told_of([SENT[at : at + 1] for at in range(len(SENT))]) == TOLD
    for cut in range(1, len(SENT)):
        assert await told_of([SENT[:cut], SENT[cut:]]) == TOLD, cut


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a.b one 5\r\nhello\r\n",
        b"MSG a.b 1\r\n",
        b"MSG a b c d 1 5\r\nhello\r\n",
        b"MSG a.b 1 -5\r\nhello\r\n",
        b"HMSG a.b 1 9 5\r\nhello\r\n",
        b"x" * (MAX_LINE_BYTES + 1),
    ],
)
async def test_what_is_no_message_ends_the_connection(line: bytes) -> None:
    told: list[bytes] = []
    reader = DirectReader(Writing(), lambda sid, subject, *rest: not told.append(subject))
    reader.data_received(b"MSG before 1 0\r\n\r\n" + line)
    with pytest.raises(Malformed):
        await reader.command()
    reader.data_received(b"MSG behind 1 0\r\n\r\n")
    assert told == [b"before"]


async def test_what_came_before_the_end_is_told_and_the_writing_side_hears_of_it() -> None:
    writing = Writing()
    reader = DirectReader(writing, lambda *message: True)
    reader.pause_writing()
    reader.resume_writing()
    reader.data_received(b"PONG\r\n")
    reader.connection_lost(ConnectionResetError("reset"))
    assert await reader.command() == b"PONG\r\n"
    with pytest.raises(ConnectionResetError):
        await reader.command()
    assert writing.heard == ["pause", "resume", "lost"]
