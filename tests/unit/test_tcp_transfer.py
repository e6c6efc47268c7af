"""KV over TCP: what arrives is what lay there, and nobody gets what his lease does not name."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.contracts.attempt import Attempt
from shared.contracts.errors import SettingsError
from shared.contracts.ids import BlockGeneration, Dispatch, Epoch, Incarnation, RequestId, WorkerId
from shared.contracts.parts import BlockRef, KvEnd
from shared.engine.worker_fake import FakePool
from shared.kv.handoff import Pull, PullItem
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.tcp_transport import TcpTransport
from shared.kv.transfer import PullResult, SharedMemoryTransport, digest_blocks
from shared.kv.transfer_limits import LIMITS, TransferLimits
from shared.kv.transfer_options import TransferOptions
from shared.kv.transfer_server import PORTS, Served, TransferServer, announced, open_listener
from shared.kv.transfer_wire import _HEAD, _MAGIC, ReadReply, ReadRequest, Wire
from shared.kv.transports import Transports
from tests.certificates import Authority

GROUPS = (LayerGroup("full", (0, 1), 2, 16, 32, "float32"), LayerGroup("window", (2,), 2, 16, 16, "float32"))
BLOCKS = (8, 8)
ATTEMPT = Attempt(RequestId("req-a"), Epoch(1), Dispatch(1))
SOURCE = WorkerId("prefill-1")
TOKEN = b"t" * 16
GENERATION = 5
WAIT_S = 30.0
PATIENT = replace(LIMITS, stall_s=WAIT_S, first_s=WAIT_S, connect_s=WAIT_S)
QUICK = replace(LIMITS, stall_s=0.3, first_s=0.3, connect_s=1.0)
MANY = replace(PATIENT, max_blocks=4000)
MUCH = [(0, block) for block in range(8)] * 500  # 64 MB: more than sockets hold


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def fill(span: memoryview, mark: int) -> None:
    span[:] = bytes((mark + i) % 251 + 1 for i in range(len(span)))


@dataclass
class Pair:
    """A source that serves its pool, and a sink with a pool in another folder."""

    source: FakePool
    own: FakePool
    server: TransferServer
    transport: TcpTransport
    counted: list[str]
    tables: tuple[list[int], ...] = ([7, 6, 5], [1, 2, 3])

    def lease(self, *blocks: tuple[int, int], attempt: Attempt = ATTEMPT) -> None:
        self.server.leases.name(attempt, TOKEN, [(group, block, GENERATION) for group, block in blocks])

    def pull(self, *blocks: tuple[int, int], valid: int = 0, **changes: Any) -> Pull:
        """Of (group, block of the source) each, into positions from 0 on."""
        items, at = [], [0, 0]
        for group, block in blocks:
            (digest,) = digest_blocks(self.source.span, ATTEMPT, [(group, block, GENERATION, at[group])])
            ref = BlockRef(block, BlockGeneration(GENERATION), digest)
            items.append(PullItem(group, at[group], ref, valid or GROUPS[group].block_size))
            at[group] += 1
        pull = Pull(
            1, ATTEMPT, SOURCE, Incarnation(3), self.source.path.name, tuple(items), self.end, TOKEN, fingerprint="fp"
        )
        return replace(pull, **changes)

    @property
    def end(self) -> KvEnd:
        return KvEnd("there", "net", announced("127.0.0.1", self.server.port, self.server._tls is not None, ""))

    def take(self, pull: Pull) -> PullResult:
        return self.transport.pull(pull, self.tables, ())


@contextmanager
def pair(
    folder: Path,
    *,
    limits: TransferLimits = PATIENT,
    source_tls: TransferOptions | None = None,
    sink_tls: TransferOptions | None = None,
) -> Iterator[Pair]:
    source = FakePool(folder / "source", SOURCE, PoolLayout(GROUPS, BLOCKS))
    own = FakePool(folder / "own", WorkerId("decode-1"), PoolLayout(GROUPS, BLOCKS))
    counted: list[str] = []
    tls = (source_tls or TransferOptions()).server_tls()
    listener = open_listener("127.0.0.1", 0, tls is not None)
    server = TransferServer(listener, Served(3, "fp", source.span), tls, counted.append, limits)
    server.start()
    transport = TcpTransport(GROUPS, own.span, (sink_tls or TransferOptions()).client_tls(), limits)
    try:
        yield Pair(source, own, server, transport, counted)
    finally:
        transport.close()
        server.stop()
        until(lambda: not [thread for thread in threading.enumerate() if thread.name in ("kv-serve", "kv-accept")])
        source.close()
        own.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path) as found:
        _fill_and_lease(found)
        yield found


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Pair]:
    """Two that wait for nothing long."""
    with pair(tmp_path, limits=QUICK) as found:
        _fill_and_lease(found)
        yield found


def _fill_and_lease(two: Pair) -> None:
    for group in range(len(GROUPS)):
        for block in range(8):
            fill(two.source.span(group, block), 10 * group + block)
    two.lease((0, 4), (0, 5), (1, 2))


def test_blocks_of_every_group_arrive_whole(two: Pair) -> None:
    result = two.take(two.pull((0, 4), (1, 2), (0, 5)))
    assert result == PullResult((), 2 * GROUPS[0].span_bytes + GROUPS[1].span_bytes, path="tcp")
    assert bytes(two.own.span(0, 7)) == bytes(two.source.span(0, 4))
    assert bytes(two.own.span(0, 6)) == bytes(two.source.span(0, 5))
    assert bytes(two.own.span(1, 1)) == bytes(two.source.span(1, 2))
    assert not any(two.own.span(0, 5))


def test_a_connection_serves_pull_after_pull(two: Pair) -> None:
    for _ in range(5):
        assert two.take(two.pull((0, 4))).error == ""
    assert len(two.server._open) == 1
    until(lambda: two.counted == ["served"] * 5)


def test_a_kept_connection_that_has_ended_is_opened_anew(two: Pair) -> None:
    assert two.take(two.pull((0, 4))).error == ""
    for wire in list(two.server._open):
        wire.shut()
    until(lambda: not two.server._open)
    assert two.take(two.pull((0, 4))).error == ""


def test_a_changed_source_is_a_mismatch(two: Pair) -> None:
    pull = two.pull((0, 4), (0, 5))
    two.source.span(0, 5)[100] ^= 1
    assert two.take(pull).bad == ((0, 1),)
    assert two.take(two.pull((0, 4))).bad == (), "the connection goes on"


def test_the_rest_of_a_tail_is_zero(two: Pair) -> None:
    fill(two.own.span(0, 7), 9)
    result = two.take(two.pull((0, 4), valid=3))
    assert result.bad == ((0, 0),), "residue was not part of the deal"
    row, tile = 64, 32 * 64
    for start in range(0, GROUPS[0].span_bytes, tile):
        assert not any(two.own.span(0, 7)[start + 3 * row : start + tile])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease_token": b"x" * 16}, "no_lease"),
        ({"lease_token": b""}, "no_lease"),
        ({"lease_token": TOKEN[:8]}, "no_lease"),
        ({"attempt": Attempt(RequestId("req-b"), Epoch(1), Dispatch(1))}, "no_lease"),
        ({"attempt": Attempt(RequestId("req-a"), Epoch(1), Dispatch(2))}, "no_lease"),
        ({"source_incarnation": Incarnation(2)}, "stale_generation"),
        ({"fingerprint": "other"}, "fingerprint_mismatch"),
    ],
)
def test_who_has_no_lease_or_another_pool_gets_nothing(two: Pair, changes: dict[str, Any], reason: str) -> None:
    before = bytes(two.own.span(0, 7))
    result = two.take(two.pull((0, 4), **changes))
    assert (result.error, result.num_bytes) == (f"transfer_refused: {reason}", 0)
    assert bytes(two.own.span(0, 7)) == before
    assert two.counted == ["refused"]
    until(lambda: not two.server._open)
    assert two.take(two.pull((0, 4))).error == "", "by the right lease"


def test_who_is_refused_keeps_no_connection(two: Pair) -> None:
    with socket.create_connection(("127.0.0.1", two.server.port)) as sock:
        _ask(sock, two, [(0, 3)])
        assert _read_all(sock) == len(_reply(0, "not_named"))


@pytest.mark.parametrize("span", [(0, 3), (1, 4), (1, 3), (0, 99), (0, -1)])
def test_only_what_the_lease_names_is_read(two: Pair, span: tuple[int, int]) -> None:
    item = PullItem(span[0], 0, BlockRef(span[1], BlockGeneration(GENERATION), b"d" * 16), 1)
    assert two.take(replace(two.pull((0, 4)), items=(item,))).error == "transfer_refused: not_named"


def test_a_block_of_another_generation_is_not_read(two: Pair) -> None:
    item = PullItem(0, 0, BlockRef(4, BlockGeneration(GENERATION + 1), b"d" * 16), 32)
    assert two.take(replace(two.pull((0, 4)), items=(item,))).error == "transfer_refused: not_named"


def test_an_ended_lease_reads_nothing_more(two: Pair) -> None:
    assert two.take(two.pull((0, 4))).error == ""
    until(lambda: two.counted == ["served"])
    ended: list[int] = []
    two.server.leases.close(ATTEMPT, lambda: ended.append(1))
    assert ended == [1]
    assert two.take(two.pull((0, 4))).error == "transfer_refused: no_lease"
    assert len(two.server.leases) == 0


def test_a_lease_that_ends_cuts_its_reader_off_before_the_blocks_go(tmp_path: Path) -> None:
    with pair(tmp_path, limits=MANY) as two:
        two.lease(*MUCH)
        with _connected(two) as sock:
            _ask(sock, two, MUCH)  # of which nothing is read
            until(lambda: any(lease.readings for lease in two.server.leases._leases.values()))
            time.sleep(0.05)
            ended = threading.Event()
            two.server.leases.close(ATTEMPT, ended.set)
            assert ended.wait(WAIT_S)
            assert _read_all(sock) < len(MUCH) * GROUPS[0].span_bytes
        until(lambda: two.counted == ["broken"])


def test_a_slow_reader_is_let_go_of(tmp_path: Path) -> None:
    with pair(tmp_path, limits=replace(MANY, stall_s=0.3)) as two:
        two.lease(*MUCH)
        with _connected(two) as sock:
            _ask(sock, two, MUCH)
            until(lambda: two.counted == ["broken"])
        ended: list[int] = []
        two.server.leases.close(ATTEMPT, lambda: ended.append(1))
        assert ended == [1], "nobody reads by it any more"


def _connected(two: Pair) -> socket.socket:
    """With little room for what is not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.connect(("127.0.0.1", two.server.port))
    return sock


def _ask(sock: socket.socket, two: Pair, spans: list[tuple[int, int]]) -> None:
    named = tuple((group, block, GENERATION) for group, block in spans)
    Wire(sock, WAIT_S).send_frame(ReadRequest(ATTEMPT, TOKEN, 3, "fp", named), time.monotonic() + WAIT_S)


def _read_all(sock: socket.socket) -> int:
    sock.settimeout(WAIT_S)
    got = 0
    try:
        while piece := sock.recv(1 << 16):
            got += len(piece)
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"BKV1\xff\xff\xff\x7f" + b"x" * 64,
        b"BKV1\x05\x00\x00\x00hello",
        b"BKV1\x00\x00\x00\x00",
        b"BKV1\x40\x00\x00\x00half",
        b"",
    ],
)
def test_what_is_no_request_ends_the_connection(quick: Pair, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", quick.server.port)) as sock:
        sock.sendall(sent)
        assert _read_all(sock) == 0
    until(lambda: not quick.server._open)
    until(lambda: quick.take(quick.pull((0, 4))).error == "")


def test_more_connections_than_are_allowed_are_closed(tmp_path: Path) -> None:
    with pair(tmp_path, limits=replace(PATIENT, max_connections=2)) as two:
        two.lease((0, 4))
        first = [socket.create_connection(("127.0.0.1", two.server.port)) for _ in range(2)]
        until(lambda: len(two.server._open) == 2)
        assert two.take(two.pull((0, 4))).error.startswith("transfer_unreachable")
        for sock in first:
            sock.close()
        until(lambda: not two.server._open)
        assert two.take(two.pull((0, 4))).error == ""


def test_a_connection_without_a_thread_is_closed_and_the_next_is_served(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        assert two.take(two.pull((0, 4))).error.startswith("transfer_unreachable")
    assert not two.server._open
    assert two.take(two.pull((0, 4))).error == ""


def test_a_request_for_too_many_blocks_is_refused(tmp_path: Path) -> None:
    with pair(tmp_path, limits=replace(PATIENT, max_blocks=1)) as two:
        two.lease((0, 4), (0, 5))
        assert two.take(two.pull((0, 4), (0, 5))).error == "transfer_refused: too_many_blocks"


# ------------------------------------------------------------------------------------------ peers that fail


@contextmanager
def impostor(answer: Callable[[socket.socket], None]) -> Iterator[KvEnd]:
    """A source that takes a request and does what the test wants."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield KvEnd("there", "net", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(WAIT_S)


def _reply(size: int, refused: str = "") -> bytes:
    body = msgspec.msgpack.encode(ReadReply(size, refused))
    return _HEAD.pack(_MAGIC, len(body)) + body


def test_a_source_that_dies_in_mid_pull(two: Pair) -> None:
    size = GROUPS[0].span_bytes
    with impostor(lambda sock: sock.sendall(_reply(size) + bytes(size // 2))) as end:
        assert two.take(two.pull((0, 4), kv=end)).error.startswith("transfer_closed")


def test_a_source_that_ends_a_new_connection_is_out_of_reach_and_a_kept_one_is_closed(two: Pair) -> None:
    with impostor(lambda sock: None) as end:
        assert two.take(two.pull((0, 4), kv=end)).error.startswith("transfer_unreachable")

    def once(sock: socket.socket) -> None:
        sock.sendall(_reply(GROUPS[0].span_bytes) + bytes(two.source.span(0, 4)))
        sock.recv(4096)

    with impostor(once) as end:
        assert two.take(two.pull((0, 4), kv=end)).error == ""
        assert two.take(two.pull((0, 4), kv=end)).error.startswith("transfer_closed")


def test_a_source_that_falls_silent_in_mid_pull(quick: Pair) -> None:
    size = GROUPS[0].span_bytes
    over = threading.Event()

    def half(sock: socket.socket) -> None:
        sock.sendall(_reply(size) + bytes(size // 2))
        over.wait(WAIT_S)

    with impostor(half) as end:
        started = time.monotonic()
        assert quick.take(quick.pull((0, 4), kv=end)).error.startswith("transfer_timed_out")
        assert time.monotonic() - started < WAIT_S / 2
        over.set()


def test_a_source_that_trickles_is_too_slow_on_the_whole(quick: Pair) -> None:
    size = GROUPS[0].span_bytes

    def trickle(sock: socket.socket) -> None:
        try:
            sock.sendall(_reply(size))
            for _ in range(200):
                sock.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass

    with impostor(trickle) as end:
        assert quick.take(quick.pull((0, 4), kv=end)).error.startswith("transfer_timed_out")


@pytest.mark.parametrize(
    "sent", [b"HTTP/1.1 200 OK\r\n\r\n" + bytes(64), _reply(1), _reply(0), b"BKV1\x01\x00\x00\x00\xc1"]
)
def test_a_source_that_answers_nonsense(two: Pair, sent: bytes) -> None:
    with impostor(lambda sock: sock.sendall(sent)) as end:
        assert two.take(two.pull((0, 4), kv=end)).error.startswith("transfer_refused")


def test_an_address_where_nobody_listens(two: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = two.take(two.pull((0, 4), kv=KvEnd(address=f"tcp://127.0.0.1:{port}")))
    assert result.error.startswith("transfer_unreachable")


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:1", "ftp://h:1", "tcp://:1", "tcp://h", "tcp://h:x", "tcp://192.0.2.1:9"]
)
def test_an_address_that_may_not_be_asked(two: Pair, address: str) -> None:
    assert two.take(two.pull((0, 4), kv=KvEnd(address=address))).error.startswith("transfer_unreachable")


# ------------------------------------------------------------------------------------------ TLS and listening


def options(authority: Authority, name: str, **changes: str) -> TransferOptions:
    files = authority.worker(name, **changes)
    return TransferOptions(cert=files.cert, key=files.key, ca=files.ca)


def test_over_tls(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    with pair(tmp_path, source_tls=options(ours, "p"), sink_tls=options(ours, "d")) as two:
        fill(two.source.span(0, 4), 3)
        two.lease((0, 4), (1, 2))
        for _ in range(3):
            assert two.take(two.pull((0, 4), (1, 2))) == PullResult(
                (), GROUPS[0].span_bytes + GROUPS[1].span_bytes, path="tcp"
            )
        assert len(two.server._open) == 1
        assert two.end.address.startswith("tls://")


@pytest.mark.parametrize("who", ["source", "sink", "name", "no certificate", "plain"])
def test_a_peer_without_a_certificate_of_the_authority_is_refused(tmp_path: Path, who: str) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others", "other")
    source, sink = options(ours, "p"), options(ours, "d")
    if who == "source":
        source = replace(options(others, "p"), ca=str(ours.ca))
    elif who == "sink":
        sink = replace(options(others, "d"), ca=str(ours.ca))
    elif who == "name":
        source = options(ours, "p", dns="elsewhere")
    with pair(tmp_path, source_tls=source, sink_tls=sink) as two:
        two.lease((0, 4))
        if who == "no certificate":
            assert two.transport._tls is not None
            bare = type(two.transport._tls)(two.transport._tls.protocol)
            bare.load_verify_locations(str(ours.ca))
            two.transport._tls = bare
        elif who == "plain":
            two.transport._tls = None
        result = two.take(two.pull((0, 4)))
        assert result.error.startswith("transfer_unreachable")
        assert result.num_bytes == 0
        assert two.counted == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_tls_only_loopback_is_listened_on(host: str) -> None:
    for refuse in (lambda: open_listener(host, 0, tls=False), TransferOptions(host=host).require):
        with pytest.raises(SettingsError) as caught:
            refuse()
        assert caught.value.param == "kv.transfer_host"


def test_the_next_free_port_is_taken() -> None:
    with open_listener("127.0.0.1", 0, tls=False) as first:
        port = first.getsockname()[1]
        with open_listener("127.0.0.1", port, tls=False) as second:
            assert port < second.getsockname()[1] < port + PORTS


def test_what_peers_are_told_to_connect_to() -> None:
    assert announced("127.0.0.1", 5, False, "") == "tcp://127.0.0.1:5"
    assert announced("::1", 5, True, "") == "tls://[::1]:5"
    assert announced("0.0.0.0", 5, True, "prefill.example") == "tls://prefill.example:5"
    assert announced("0.0.0.0", 5, True, "") == f"tls://{socket.gethostname()}:5"


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_all_three_files_are_needed_and_looked_at(tmp_path: Path, missing: str) -> None:
    whole = options(Authority(tmp_path), "p")
    whole.require()
    for value, words in (("", "is missing"), (str(tmp_path / "nowhere"), "No such file")):
        with pytest.raises(SettingsError, match=words) as caught:
            replace(whole, **{missing: value}).require()
        assert caught.value.param == f"kv.transfer_{missing}"
    with pytest.raises(SettingsError) as caught:
        replace(whole, **{missing: __file__}).require()
    assert caught.value.param in ("kv.transfer_cert", "kv.transfer_ca")


# ------------------------------------------------------------------------------------------ which way


def test_a_pool_in_the_same_folder_is_mapped_and_one_elsewhere_is_read_over_tcp(two: Pair) -> None:
    mapped = SharedMemoryTransport(two.source.path.parent, GROUPS, two.own.span)
    both = Transports(KvEnd("there", "net"), mapped, two.transport)
    assert both.pull(two.pull((0, 4)), two.tables, BLOCKS).path == "shared_memory"
    elsewhere = Transports(KvEnd("here", "net"), mapped, two.transport)
    assert elsewhere.pull(two.pull((0, 4)), two.tables, BLOCKS).path == "tcp"
    forced = Transports(KvEnd("there", "net", transfer="tcp"), mapped, two.transport)
    assert forced.pull(two.pull((0, 4)), two.tables, BLOCKS).path == "tcp"
    for alone in (KvEnd("here", "net", transfer="shared-memory"), KvEnd("here", "other")):
        result = Transports(alone, mapped, two.transport).pull(two.pull((0, 4)), two.tables, BLOCKS)
        assert result.error.startswith("pool_unreadable")
    mapped.close()


def test_a_pool_that_cannot_be_mapped_after_all_is_read_over_tcp(two: Pair, tmp_path: Path) -> None:
    mapped = SharedMemoryTransport(tmp_path / "nothing", GROUPS, two.own.span)
    both = Transports(KvEnd("there", "net"), mapped, two.transport)
    assert both.pull(two.pull((0, 4)), two.tables, BLOCKS) == PullResult((), GROUPS[0].span_bytes, path="tcp")
    only = Transports(KvEnd("there", "net", transfer="shared-memory"), mapped, two.transport)
    assert only.pull(two.pull((0, 4)), two.tables, BLOCKS).error.startswith("pool_unreadable")
