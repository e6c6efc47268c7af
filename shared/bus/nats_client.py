"""nats-py's client, changed where its tasks, queues and futures cost more than the messages they carry."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.command import hpub_cmd, pub_cmd

from shared.bus.envelope import headers_size
from shared.bus.nats_reading import DirectReader, Malformed

log = logging.getLogger("baton.bus")

MAX_UNSENT_BYTES = 256 * 1024
"""What may lie in this process for a server that takes nothing, before a message waits for it in its sender's queue."""
MAX_HEADS = 256
"""Subjects whose messages' begin is kept."""
PLAIN_HEADERS = b"NATS/1.0\r\n"
STATUS, NO_RESPONDERS = "Status", "503"


class AtOnce:
    """In the place of a subscription's future: nats-py gives it each message where it reads it.

    A callback would have a queue and a task of its own, which are woken for each message.
    """

    def __init__(self, take: Callable[[Msg], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        return False


class DirectClient(Client):
    """nats-py's client, with ways past its tasks and queues, and with headers as tenants like to write them."""

    _asked = 0

    def __init__(self) -> None:
        super().__init__()
        self._heads: dict[str, bytes] = {}  # how messages to a subject begin
        self._numbered: asyncio.WriteTransport | None = None
        self._number = -1

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """As the library's, whose queue and task only what cannot be written at once passes.

        Raises nats.errors.MaxPayloadError for what is too large with its headers, which the library does not count: the
        server would end the connection.
        """
        if not self.write(subject, payload, reply, headers):
            if headers and len(payload) + headers_size(headers) > self._max_payload:
                raise nats.errors.MaxPayloadError
            await super().publish(subject, payload, reply, dict(headers) if headers is not None else None)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """As the library's new style. Raises nats.errors.TimeoutError, NoRespondersError and what `publish` raises."""
        if old_style:
            return await super().request(subject, payload, timeout, old_style=True)
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        assert self._resp_sub_prefix is not None
        self._asked += 1
        token, loop = str(self._asked), asyncio.get_running_loop()
        asking: asyncio.Future[Msg] = loop.create_future()
        self._resp_map[token] = asking
        timer = loop.call_later(timeout, _give_up, asking)
        try:
            await self.publish(subject, payload, (self._resp_sub_prefix + token.encode()).decode(), headers)
            answer = await asking
        finally:
            timer.cancel()
            self._resp_map.pop(token, None)
        if answer.headers and answer.headers.get(STATUS) == NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return answer

    async def _init_request_sub(self) -> None:
        await super()._init_request_sub()
        for sub in self._subs.values():
            if sub._cb == self._request_sub_callback:  # it only wakes who asked
                sub._future = AtOnce(self._on_reply)  # type: ignore[assignment]

    def _on_reply(self, msg: Msg) -> None:
        asking = self._resp_map.get(msg.subject[len(self._inbox_prefix) + 24 :])
        if asking is not None and not asking.done():
            asking.set_result(msg)

    def write(self, subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bool:
        """Give the socket a message. False: others wait before it, the server takes no more or is gone, or it is not
        well formed.

        A message that is not well formed is left to the library, which refuses it.
        """
        transport = self._transport
        if self._pending or self._status != Client.CONNECTED or not isinstance(transport, TcpTransport):
            return False
        writer = transport._io_writer
        if writer is None or not (_is_name(subject) and (not reply or _is_name(reply))):
            return False
        lines = b"" if headers is None else _header_lines(headers)
        if lines is None or len(lines) + len(payload) > self._max_payload:
            return False
        socket = writer.transport
        if socket.is_closing() or socket.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False  # one that was just lost is known to the client a turn of the loop later
        command = hpub_cmd(subject, reply, lines, payload) if lines else pub_cmd(subject, reply, payload)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        socket.write(command)
        return True

    def write_at_once(self, subject: str, payload: bytes) -> bool:
        """As `write` of a message without reply and headers, by a call of the system here and now.

        The event loop would gather what is written in a turn of it, and make another turn for that.
        """
        head = self._heads.get(subject)
        if head is None:
            if not _is_name(subject):
                return False
            if len(self._heads) == MAX_HEADS:
                self._heads.clear()
            head = self._heads[subject] = f"PUB {subject} ".encode()
        transport = self._transport
        if self._pending or self._status != Client.CONNECTED or len(payload) > self._max_payload:
            return False
        if not isinstance(transport, TcpTransport) or (writer := transport._io_writer) is None:
            return False
        socket = writer.transport
        if socket.is_closing() or socket.get_write_buffer_size() or (number := self._number_of(socket)) < 0:
            return self.write(subject, payload)
        command = b"%b%d\r\n%b\r\n" % (head, len(payload), payload)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        try:
            sent = os.write(number, command)
        except OSError:  # it is full, or gone, which the transport finds too
            sent = 0
        if sent < len(command):
            socket.write(command[sent:])
        return True

    def _number_of(self, socket: asyncio.WriteTransport) -> int:
        """The file number of a connection; -1 of one that is encrypted."""
        if socket is not self._numbered:
            plain = socket.get_extra_info("sslcontext") is None
            self._numbered, self._number = socket, socket.get_extra_info("socket").fileno() if plain else -1
        return self._number

    async def _read_loop(self) -> None:
        transport = self._transport
        if not isinstance(transport, TcpTransport) or transport._io_writer is None or transport._io_reader is None:
            await super()._read_loop()
            return
        socket, stream = transport._io_writer.transport, transport._io_reader
        reader = DirectReader(socket.get_protocol(), self._take)
        begun = bytes(stream._buffer)  # type: ignore[attr-defined]  # what came right behind the greeting
        socket.set_protocol(reader)
        reader.data_received(begun)
        if stream._eof or stream.exception() is not None:  # type: ignore[attr-defined]
            reader.ended(stream.exception())
        else:
            socket.resume_reading()  # type: ignore[attr-defined]
        try:
            while not (self.is_closed or self.is_reconnecting):
                await self._ps.parse(await reader.command())
        except asyncio.CancelledError:
            pass
        except Malformed:
            await self._process_op_err(nats.errors.ProtocolError())
        except EOFError:
            unexpected = nats.errors.UnexpectedEOF()
            await self._error_cb(unexpected)
            await self._process_op_err(unexpected)
        except (OSError, nats.errors.ProtocolError) as exc:
            await self._process_op_err(exc)
        except Exception as exc:  # a connection that nobody reads would look sound for minutes
            log.exception("reading from NATS failed")
            await self._process_op_err(exc)
        finally:
            reader.stop()

    def _take(self, sid: int, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bool:
        sub = self._subs.get(sid)
        if sub is None:  # it was ended
            return True
        take: object = sub._future
        if not isinstance(take, AtOnce) or sub._max_msgs or (headers and not headers.startswith(PLAIN_HEADERS)):
            return False
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(payload)
        sub._received += 1
        found = self._parse_header_lines(headers[len(PLAIN_HEADERS) :]) if headers else None
        take.set_result(Msg(self, subject.decode(), reply.decode(), payload, found, _sid=sid))
        return True

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except Exception:  # the library would stop reading for good
            log.warning("dropped a message's headers: they do not decode")
            return None

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """As nats-py's own, which looks at every character of every name."""
        found: dict[str, str] = {}
        for line in raw.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            key = name.strip()
            if colon and key.isascii() and len(key.split()) < 2:
                found[key.decode()] = value.strip().decode("utf-8", "replace")
        return found


def _is_name(subject: str) -> bool:
    return subject.isprintable() and bool(subject) and " " not in subject


def _give_up(asking: asyncio.Future[Msg]) -> None:
    if not asking.done():
        asking.set_exception(nats.errors.TimeoutError())


def _header_lines(headers: Mapping[str, str]) -> bytes | None:
    """A message's headers on the wire; None when a name or value would need changing first."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "" in headers:
        return None
    return PLAIN_HEADERS + lines.encode() + b"\r\n"
