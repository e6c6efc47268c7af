"""Pulling KV from a peer whose memory we cannot map: its worker sends the spans over TCP, straight into our blocks."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.errors import BatonError, ProtocolError, Unavailable
from shared.contracts.ids import WorkerId
from shared.kv.digest import span_digest
from shared.kv.handoff_sink import Pull
from shared.kv.layout import LayerGroup
from shared.kv.transfer import OwnSpan, PullResult, zero_rest
from shared.kv.transfer_limits import LIMITS, TransferLimits
from shared.kv.transfer_path import TCP, KvAddress, is_loopback, parse_address
from shared.kv.transfer_wire import REFUSED, UNREACHABLE, ReadReply, ReadRequest, Wire, refused


@dataclass(slots=True)
class _Connection:
    address: str
    wire: Wire
    used_at: float  # on the monotonic clock
    has_served: bool = False


class TcpTransport:
    """Keeps a connection a peer. Pulls of different peers may run in different threads, those of one in turn."""

    path = TCP

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        own_span: OwnSpan,
        tls: ssl.SSLContext | None = None,
        limits: TransferLimits = LIMITS,
    ) -> None:
        self._groups = groups
        self._own_span = own_span
        self._tls = tls
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: dict[WorkerId, _Connection] = {}

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        """See `Transport.pull`. `source_blocks` is not needed: the source knows its pool."""
        try:
            connection = self._kept(pull) or self._connect(pull.kv.address)
        except BatonError as exc:
            return _failed(exc)
        try:
            size = sum(self._groups[item.group].span_bytes for item in pull.items)
            until = time.monotonic() + self._limits.whole_s(size)
            reply = self._reply(connection, pull, until)
            if reply.num_bytes != size:
                raise ProtocolError(f"{reply.num_bytes} bytes come, {size} were asked for", code=REFUSED)
            result = self._take(connection.wire, pull, tables, until)
        except BatonError as exc:
            connection.wire.close()
            return _failed(exc)
        except BaseException:
            connection.wire.close()
            raise
        self._keep(pull.source, connection)
        return result

    def drop_dead(self) -> None:
        """See `Transport.drop_dead`: connections that were not used for long, the dead ones' among them."""
        before = time.monotonic() - self._limits.idle_s / 2
        with self._lock:
            old = [worker for worker, known in self._idle.items() if known.used_at < before]
            dropped = [self._idle.pop(worker) for worker in old]
        for connection in dropped:
            connection.wire.close()

    def close(self) -> None:
        with self._lock:
            dropped = list(self._idle.values())
            self._idle.clear()
        for connection in dropped:
            connection.wire.close()

    # -------------------------------------------------------------------------------------------- inside

    def _reply(self, connection: _Connection, pull: Pull, until: float) -> ReadReply:
        """What the source says to the pull's request.

        A connection that ends before it has served anything is no way to the source: it has as many as it takes, or
        wants none of ours, as TLS 1.3 tells only after our handshake has ended.
        """
        spans = tuple((item.group, item.block.block_id, int(item.block.generation)) for item in pull.items)
        request = ReadRequest(
            attempt=pull.attempt,
            token=pull.lease_token,
            incarnation=int(pull.source_incarnation),
            fingerprint=pull.fingerprint,
            spans=spans,
        )
        try:
            connection.wire.send_frame(request, time.monotonic() + self._limits.stall_s)
            reply = connection.wire.receive_frame(ReadReply, self._limits.max_frame_bytes, until)
        except Unavailable as exc:
            if connection.has_served:
                raise
            raise Unavailable(f"{connection.address}: {exc.message}", code=UNREACHABLE) from exc
        if reply.refused:
            raise refused(reply.refused)
        return reply

    def _kept(self, pull: Pull) -> _Connection | None:
        with self._lock:
            known = self._idle.pop(pull.source, None)
        if known is None:
            return None
        old = time.monotonic() - known.used_at > self._limits.idle_s / 2
        if old or known.address != pull.kv.address or _has_ended(known.wire):
            known.wire.close()
            return None
        return known

    def _keep(self, source: WorkerId, connection: _Connection) -> None:
        connection.used_at, connection.has_served = time.monotonic(), True
        with self._lock:
            before = self._idle.pop(source, None)
            self._idle[source] = connection
        if before is not None:
            before.wire.close()

    def _connect(self, text: str) -> _Connection:
        address = parse_address(text)
        if address is None:
            raise Unavailable(f"{text!r} is not the address of a KV listener", code=UNREACHABLE)
        return _Connection(text, Wire(self._socket(address), self._limits.stall_s), time.monotonic())

    def _socket(self, address: KvAddress) -> socket.socket:
        """Connected, and over TLS where the peer has it. KV and tokens do not leave the machine in plain."""
        if address.tls and self._tls is None:
            raise Unavailable(f"{address} needs TLS: set kv.transfer_cert, _key and _ca here too", code=UNREACHABLE)
        if not address.tls and not is_loopback(address.host):
            raise Unavailable(f"{address} is another machine's, without TLS", code=UNREACHABLE)
        try:
            sock = socket.create_connection((address.host, address.port), self._limits.connect_s)
        except OSError as exc:
            raise Unavailable(f"{address}: {exc.strerror or exc}", code=UNREACHABLE) from exc
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not address.tls or self._tls is None:
            return sock
        try:
            return self._tls.wrap_socket(sock, server_hostname=address.host)
        except OSError as exc:
            sock.close()
            reason = exc.reason if isinstance(exc, ssl.SSLError) else exc.strerror
            raise Unavailable(f"{address}: TLS failed: {reason or exc}", code=UNREACHABLE) from exc

    def _take(self, wire: Wire, pull: Pull, tables: Sequence[Sequence[int]], until: float) -> PullResult:
        """Spans into our blocks, in order; the next one comes in while one is digested."""
        bad, num_bytes = [], 0
        for item in pull.items:
            own = self._own_span(item.group, tables[item.group][item.position])
            wire.receive(own, until)
            num_bytes += own.nbytes
            zero_rest(own, self._groups[item.group], item.valid_tokens)
            digest = span_digest(own, pull.attempt, item.group, item.block.generation, item.position)
            if digest != item.block.digest:
                bad.append((item.group, item.position))
        return PullResult(tuple(bad), num_bytes, path=TCP)


def _failed(exc: BatonError) -> PullResult:
    return PullResult(error=f"{exc.code}: {exc.message}", path=TCP)


def _has_ended(wire: Wire) -> bool:
    """Between requests nothing comes: what can be read is the connection's end."""
    wire.sock.setblocking(False)
    try:
        wire.sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    return True
