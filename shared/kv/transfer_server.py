"""Serves the spans of our pool to decode workers that cannot map it: read-only, by lease, over TCP.

A thread a connection, at most so many; each sends spans straight from the pool. Nothing here waits for the event loop
or the engine, nor do they for it: a lease that ends cuts off who reads by it, and its blocks go when he has let go.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shared.contracts.errors import BatonError, SettingsError
from shared.kv.read_leases import ReadLeases
from shared.kv.transfer_limits import LIMITS, TransferLimits
from shared.kv.transfer_options import NEEDS_TLS
from shared.kv.transfer_path import KvAddress, is_loopback
from shared.kv.transfer_wire import ReadReply, ReadRequest, Wire, refused

log = logging.getLogger("baton.kv")

PORTS = 64
"""So many from the one that is set are tried: workers of a machine share it, and one beside its successor."""
STALE, OTHER_FINGERPRINT, TOO_MANY = "stale_generation", "fingerprint_mismatch", "too_many_blocks"


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: the pool of one process, whose blocks fit those who have its fingerprint."""

    incarnation: int
    fingerprint: str
    span: Callable[[int, int], memoryview]  # (group, block id) → its bytes; raises IndexError


class TransferServer:
    """Use as `start()` … `stop()`. `count` is told the outcome of each read: served, refused or broken."""

    def __init__(
        self,
        listener: socket.socket,
        served: Served,
        tls: ssl.SSLContext | None = None,
        count: Callable[[str], None] = lambda outcome: None,
        limits: TransferLimits = LIMITS,
    ) -> None:
        self.leases = ReadLeases()
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._served = served
        self._tls = tls
        self._count = count
        self._limits = limits
        self._lock = threading.Lock()
        self._open: dict[Wire, threading.Thread] = {}
        self._stopping = False
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def stop(self) -> None:
        """Cut every connection off and wait for its thread: afterwards nobody reads the pool. Idempotent."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the one who accepts
        self._listener.close()
        if self._accepting.is_alive():
            self._accepting.join()
        with self._lock:
            left = list(self._open.items())
        for wire, _ in left:
            wire.shut()
        for _, thread in left:
            thread.join()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if not self._stopping:
                    log.error("the KV listener failed: %s", exc.strerror)
                    time.sleep(0.1)  # out of file descriptors, say
                continue
            wire = Wire(sock, self._limits.stall_s)
            thread = threading.Thread(target=self._serve, args=(wire,), name="kv-serve", daemon=True)
            with self._lock:
                full = len(self._open) >= self._limits.max_connections
                if not full:
                    self._open[wire] = thread
            if full or not _started(thread):
                with self._lock:
                    self._open.pop(wire, None)
                wire.close()

    def _serve(self, wire: Wire) -> None:
        try:
            self._secure(wire)
            wait_s = self._limits.first_s
            while not self._stopping:
                request = self._next(wire, wait_s)
                if request is None or not self._answer(wire, request):
                    return  # who was refused keeps no connection from others
                wait_s = self._limits.idle_s
        except (BatonError, OSError) as exc:
            log.debug("a KV connection ended: %s", exc)
        finally:
            with self._lock:
                self._open.pop(wire, None)
            wire.close()

    def _secure(self, wire: Wire) -> None:
        """TLS, where it is set up, within the time a connection may take."""
        wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:
            wire.sock.settimeout(self._limits.connect_s)
            wire.sock = self._tls.wrap_socket(wire.sock, server_side=True)

    def _next(self, wire: Wire, wait_s: float) -> ReadRequest | None:
        """The next request; None when it was closed, or nothing came."""
        limits = self._limits
        until = time.monotonic() + wait_s + limits.stall_s
        try:
            return wire.receive_frame(ReadRequest, limits.max_frame_bytes, until, wait_s)
        except BatonError:
            return None

    def _answer(self, wire: Wire, request: ReadRequest) -> bool:
        """False: it was refused."""
        try:
            with self._allowed(request, wire) as spans:
                size = sum(span.nbytes for span in spans)
                until = time.monotonic() + self._limits.whole_s(size)
                wire.send_frame(ReadReply(num_bytes=size), until)
                for span in spans:
                    wire.send(span, until)
        except BatonError as exc:
            if exc.code != refused("").code:
                self._count("broken")
                raise
            self._count("refused")
            log.info("a read of KV was refused: %s", exc.message)
            wire.send_frame(ReadReply(refused=exc.message), time.monotonic() + self._limits.stall_s)
            return False
        self._count("served")
        return True

    @contextlib.contextmanager
    def _allowed(self, request: ReadRequest, wire: Wire) -> Iterator[list[memoryview]]:
        """The spans of a request, if it may have them. Raises Forbidden."""
        served = self._served
        with self.leases.reading(request, wire.shut):
            # after the lease: who has none learns nothing of us
            if request.incarnation != served.incarnation:
                raise refused(STALE)
            if request.fingerprint != served.fingerprint:
                raise refused(OTHER_FINGERPRINT)
            if len(request.spans) > self._limits.max_blocks:
                raise refused(TOO_MANY)
            yield [served.span(group, block_id) for group, block_id, _ in request.spans]


def _started(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:
        log.exception("no thread could be had to serve KV")
        return False
    return True


def open_listener(host: str, port: int, tls: bool) -> socket.socket:
    """A listening socket on `host`, at `port` or one of the next `PORTS` behind it; 0 takes a free one.

    Raises:
        SettingsError: the address is not loopback and there is no TLS, or it cannot be listened on.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as exc:
        raise SettingsError(f"kv.transfer_host: {host}: {exc.strerror}", param="kv.transfer_host") from exc
    if not tls and not is_loopback(str(address[0])):
        raise SettingsError(NEEDS_TLS.format(host), param="kv.transfer_host")
    failed = OSError()
    for number in range(port, min(port + PORTS, 65536)) if port else (0,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((str(address[0]), number))
            sock.listen(LIMITS.max_connections)
            return sock
        except OSError as exc:
            sock.close()
            failed = exc
    message = f"kv.transfer_port: {host}:{port} cannot be listened on: {failed.strerror}"
    raise SettingsError(message, param="kv.transfer_port")


def announced(host: str, port: int, tls: bool, name: str) -> str:
    """What peers are to connect to: `name` if set, else `host`, or this machine's name where that is every address."""
    everywhere = host in ("", "0.0.0.0", "::")
    return str(KvAddress(name or (socket.gethostname() if everywhere else host), port, tls))
