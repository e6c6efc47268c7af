"""Prefill and decode as on two machines: processes that share no folder, KV over TLS. A real server, a tiny model.

A relay stands on the wire between them, as a network does: it can stop in mid-pull.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.bus.nats_connection import connect_bus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.ids import WorkerId
from shared.contracts.parts import SpanRecord
from shared.contracts.sampling import SamplingParams
from shared.kv.transfer_wire import CLOSED, TIMED_OUT
from shared.lifecycle.ready import READY_VARIABLE, read_ready
from shared.security.grant_signature import public_pem
from tests.certificates import Authority
from tests.pipeline.worker_support import SIGNER, Driver, attempt, until
from tests.servers import NatsServer, start_nats
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
PROMPT = [(7 * i + 3) % 320 for i in range(1501)]  # 1.5 MB of KV
SAMPLING = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
NOBODY = WorkerId("")
SOURCE_HOST, RELAY_HOST = "127.0.0.1", "127.0.0.2"

pytestmark = pytest.mark.timeout(240)


@dataclass
class Relay:
    """Passes bytes on between a decode worker and the source behind it, until `stop_after` bytes of the source came.

    It keeps the source's port until that listens: bound and not listened on, which nobody is given who asks for any.
    """

    port: int = 0
    stop_after: int = sys.maxsize
    passed: int = 0
    stalled: threading.Event = field(default_factory=threading.Event)
    _kept: socket.socket = field(init=False)
    _listener: socket.socket = field(init=False)
    _sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        while True:  # a port that is free at both addresses
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.bind((SOURCE_HOST, 0))
            self.port = self._kept.getsockname()[1]
            try:
                self._listener = socket.create_server((RELAY_HOST, self.port))
                break
            except OSError:
                self._kept.close()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._kept, self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((SOURCE_HOST, self.port))
                self._sockets += [near, far]
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 14):
                if counted:
                    self.passed += len(piece)
                    if self.passed > self.stop_after:
                        self.stalled.set()
                        while source.recv(1 << 14):  # what the source still sends gets lost
                            pass
                        break
                sink.sendall(piece)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    ready: Path
    log: Path
    id: WorkerId = NOBODY

    def wait_ready(self) -> None:
        """Torch is imported and steps are timed, which takes long where much else runs."""
        deadline = time.monotonic() + 2 * WAIT_S
        while (facts := read_ready(self.ready)) is None:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)
        self.id = WorkerId(facts["worker"])


@contextlib.contextmanager
def worker(role: str, folder: Path, nats_url: str, **more: str) -> Iterator[Worker]:
    """A worker that starts, as a process of its own, with a pool folder of its own."""
    keys, ready, log = folder / "grant.pem", folder / f"{role}.ready", folder / f"{role}.log"
    keys.write_bytes(public_pem(SIGNER.public_key))
    keys.chmod(0o600)
    env = {
        **os.environ,
        "NATS_URL": nats_url,
        "BATON_MODEL_PATH": str(folder / "model"),
        "BATON_MODEL_DTYPE": "float32",
        "BATON_ENGINE_KERNELS": "torch",
        "BATON_ENGINE_THREADS": "1",
        "BATON_ENGINE_PREFILL_TOKEN_BUDGET": "256",
        "BATON_ENGINE_TOKEN_BUDGET": "64",
        "BATON_KV_DIR": str(folder / f"kv-{role}"),
        "BATON_KV_BLOCK_SIZE": "16",
        "BATON_KV_POOL_BYTES": str(8 * 1024 * 1024),
        "BATON_GRANT_PUBLIC_KEY_FILE": str(keys),
        READY_VARIABLE: str(ready),
        **{f"BATON_KV_TRANSFER_{name}": value for name, value in more.items()},
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{role}"], cwd=ROOT, env=env, stdout=out, stderr=out
        )
    try:
        yield Worker(process, ready, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait(10)


@dataclass
class Machines:
    """The two, and what is between them."""

    nats: NatsServer
    decode: Worker
    prefill: Worker
    relay: Relay


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    make_tiny_model(folder / "model")
    authority, relay = Authority(folder / "tls"), Relay()
    files = {
        role: {"CERT": f.cert, "KEY": f.key, "CA": f.ca}
        for role, f in (("d", authority.worker("d")), ("p", authority.worker("p", RELAY_HOST)))
    }
    nats = start_nats(folder / "nats")
    try:
        with (
            worker("prefill", folder, nats.url, PORT=str(relay.port), NAME=RELAY_HOST, **files["p"]) as prefill,
            worker("decode", folder, nats.url, **files["d"]) as decode,
        ):
            for one in (prefill, decode):
                one.wait_ready()
            yield Machines(nats, decode, prefill, relay)
    finally:
        relay.close()
        nats.kill(signal.SIGTERM)


@contextlib.asynccontextmanager
async def driver(machines: Machines) -> AsyncIterator[tuple[Driver, list[SpanRecord]]]:
    async with connect_bus(machines.nats.url, "driver") as bus:
        playing, spans = Driver(bus), list[SpanRecord]()
        await playing.start()
        await bus.subscribe(subjects.ANY_TRACE, m.SpanBatch, lambda d: spans.extend(d.message.spans))
        yield playing, spans
        await playing.stop()


async def local(d: Driver, decode: Worker, request: str, prompt: list[int]) -> list[int]:
    await until(lambda: decode.id in d.beats, WAIT_S)
    await reserved(d, decode, request, prompt)
    await d.final(request, WAIT_S)
    return d.output(request)


async def reserved(
    d: Driver, decode: Worker, request: str, prompt: list[int], prefill: WorkerId | None = None
) -> m.Reserved:
    answer = await d.reserve(decode.id, prompt, a=attempt(request), prefill=prefill, sampling=SAMPLING, lease_s=WAIT_S)
    assert isinstance(answer, m.Reserved), answer
    return answer


async def handed_off(d: Driver, both: Machines, request: str, prompt: list[int]) -> None:
    await until(lambda: {both.decode.id, both.prefill.id} <= set(d.beats), WAIT_S)
    answer = await reserved(d, both.decode, request, prompt, both.prefill.id)
    accepted = await d.run(both.prefill.id, both.decode.id, prompt, answer, a=attempt(request), lease_s=WAIT_S)
    assert isinstance(accepted, m.PrefillAccepted), accepted


async def pull_span(spans: list[SpanRecord]) -> SpanRecord:
    await until(lambda: any(span.name == "handoff.pull" for span in spans), WAIT_S)
    return next(span for span in spans if span.name == "handoff.pull")


async def test_what_is_handed_off_over_tls_equals_what_is_computed_locally(machines: Machines) -> None:
    async with driver(machines) as (d, spans):
        expected = await local(d, machines.decode, "req-l", PROMPT)
        await handed_off(d, machines, "req-h", PROMPT)
        final = await d.final("req-h", WAIT_S)
        assert d.output("req-h") == expected
        assert final.totals is not None
        assert final.totals.received_tokens == len(PROMPT) - 1
        span = await pull_span(spans)
        assert span.attributes["baton.transport"] == "tcp"
        assert span.attributes["baton.bytes"] == 94 * 16 * 1024
        assert span.attributes["baton.copy_s"] > 0
        assert machines.relay.passed > 94 * 16 * 1024
        address = d.beats[machines.prefill.id].kv.address
        assert address == f"tls://{RELAY_HOST}:{machines.relay.port}"
        await d.idle([machines.decode.id, machines.prefill.id], WAIT_S)


async def test_a_stranger_without_a_certificate_is_not_spoken_to(machines: Machines) -> None:
    with socket.create_connection((SOURCE_HOST, machines.relay.port)) as sock:
        sock.settimeout(WAIT_S)
        sock.sendall(b"BKV1\x00\x00\x00\x00")
        with contextlib.suppress(ConnectionError):
            assert b"BKV1" not in sock.recv(1024)


async def test_the_source_is_killed_in_mid_pull(machines: Machines) -> None:
    """The last of the file: it takes the prefill worker away."""
    async with driver(machines) as (d, spans):
        prompt = PROMPT[1:]
        expected = await local(d, machines.decode, "req-m", prompt)
        machines.relay.stop_after = machines.relay.passed + 300_000
        await handed_off(d, machines, "req-k", prompt)
        await until(machines.relay.stalled.is_set, WAIT_S)
        machines.prefill.process.kill()
        killed_at = time.monotonic()
        final = await d.final("req-k", WAIT_S)
        assert d.output("req-k") == expected
        assert time.monotonic() - killed_at < WAIT_S / 2, "long before the lease ends"
        assert final.totals is not None
        assert final.totals.received_tokens < len(prompt) - 1
        span = await pull_span(spans)
        # on a slow machine the silence may have been long enough before the kill came
        assert str(span.attributes["baton.reason"]).partition(":")[0] in (CLOSED, TIMED_OUT)
        await d.idle([machines.decode.id], WAIT_S)
