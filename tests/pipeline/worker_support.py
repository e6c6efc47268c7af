"""Workers on a memory bus, and a driver that plays scheduler and ingress."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from opentelemetry.trace import Tracer

from services.decode.service import DecodeWorker
from services.prefill.service import PrefillWorker
from shared.bus.bus import Bus, Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import Dispatch, Epoch, IngressId, RequestId, TenantId, Term, WorkerId
from shared.contracts.parts import GroupTags, StreamRecord
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens, unpack_tokens
from shared.engine.fake_runner import made_up_token
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.engine.worker_fences import Fences
from shared.engine.worker_shell import WorkerShell
from shared.engine.worker_transfer import open_server, open_transport
from shared.security.grant_signature import GrantSigner, GrantVerifier, by_id
from shared.telemetry.metrics import Metrics

INGRESS = IngressId("gw-1")
PROMPT = list(range(100, 130))
SIGNER = GrantSigner(Ed25519PrivateKey.generate())
VERIFIER = GrantVerifier(by_id([SIGNER.public_key]))


def verify(signed: SignedGrant) -> Grant:
    return VERIFIER.verify(signed, time.time())


def signed_grant(
    request: str,
    *,
    retention_s: int = -1,
    weight: float = 1.0,
    klass: str = "interactive",
    signer: GrantSigner = SIGNER,
) -> SignedGrant:
    tenant = TenantId("acme")
    return signer.sign(
        Grant(
            request_id=RequestId(request),
            tenant=tenant,
            scope=Scope(tenant),
            model="m",
            klass=klass,
            reservation_id="r",
            reserved_tokens=1,
            expires_s=time.time() + 600,
            budget_s=60,
            retention_s=retention_s,
            weight=weight,
        )
    )


def attempt(request: str = "req-a", epoch: int = 1, dispatch: int = 1) -> Attempt:
    return Attempt(RequestId(request), Epoch(epoch), Dispatch(dispatch))


@dataclass
class Driver:
    """Scheduler and ingress of a test, over any bus."""

    bus: Bus
    finals: dict[RequestId, StreamRecord] = field(default_factory=dict)
    tokens: dict[RequestId, dict[int, int]] = field(default_factory=dict)
    held: set[RequestId] = field(default_factory=set)
    listings: list[m.StreamFrame] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)  # tokens of each record that has any
    beats: dict[WorkerId, m.WorkerBeat] = field(default_factory=dict)
    commits: list[m.HandoffCommit] = field(default_factory=list)
    ack_finals: bool = True
    _number: int = 0
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)

    async def start(self) -> None:
        await self.bus.subscribe(subjects.stream(INGRESS), m.StreamFrame, self._on_frame)
        await self.bus.subscribe(subjects.ANY_WORKER_BEAT, m.WorkerBeat, self._on_beat)
        self._spawn(self._beat())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[object] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            self._number += 1
            beat = m.GatewayBeat(ingress_id=INGRESS, number=self._number, requests=tuple(self.held))
            await self.bus.publish(subjects.gateway_beat(INGRESS), beat)
            await asyncio.sleep(0.5)

    def _on_beat(self, delivery: Delivery) -> None:
        self.beats[delivery.message.worker] = delivery.message

    def _on_frame(self, delivery: Delivery) -> None:
        frame: m.StreamFrame = delivery.message
        if frame.listing:
            self.listings.append(frame)
        for record in frame.records:
            request = record.attempt.request_id
            known = self.tokens.setdefault(request, {})
            self.pieces += [len(record.token_ids) // 4] if record.token_ids else []
            for seq, token in enumerate(unpack_tokens(record.token_ids), start=record.first_seq):
                assert known.setdefault(seq, token) == token, "a token changed"
            if record.finish:
                self.finals[request] = record
                if self.ack_finals:
                    self._spawn(self._ack(frame.worker, record.attempt))

    async def _ack(self, worker: WorkerId, a: Attempt) -> None:
        await self.bus.request(subjects.decode(worker, "ack"), m.FinalAck(attempts=(a,)), m.FinalAcked, timeout_s=5)

    def output(self, request: str = "req-a") -> list[int]:
        """The committed tokens, which must be contiguous from 0."""
        known = self.tokens.get(RequestId(request), {})
        assert sorted(known) == list(range(len(known)))
        return [known[i] for i in range(len(known))]

    async def reserve(
        self,
        decode: WorkerId,
        token_ids: list[int],
        *,
        a: Attempt | None = None,
        prefill: WorkerId | None = None,
        sampling: SamplingParams | None = None,
        num_prompt_tokens: int = 0,
        tags: tuple[GroupTags, ...] = (),
        term: int = 1,
        lease_s: float = 5.0,
        grant: SignedGrant | None = None,
    ) -> m.Reserved | m.Refusal:
        a = a or attempt()
        self.held.add(a.request_id)
        message = m.Reserve(
            attempt=a,
            term=Term(term),
            ingress_id=INGRESS,
            grant=grant or signed_grant(a.request_id),
            token_ids=pack_tokens(token_ids),
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            sampling=(sampling or SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),),
            tags=tags,
            prefill_worker=prefill or WorkerId(""),
            lease_s=lease_s,
        )
        answer: m.Reserved | m.Refusal = await self.bus.request(
            subjects.decode(decode, "reserve"), message, m.Reserved | m.Refusal, timeout_s=10
        )
        return answer

    async def run(
        self,
        prefill: WorkerId,
        decode: WorkerId,
        token_ids: list[int],
        reserved: m.Reserved,
        *,
        a: Attempt | None = None,
        tags: tuple[GroupTags, ...] = (),
        term: int = 1,
        lease_s: float = 5.0,
    ) -> m.PrefillAccepted | m.Refusal:
        a = a or attempt()
        message = m.PrefillRun(
            attempt=a,
            term=Term(term),
            grant=signed_grant(a.request_id),
            token_ids=pack_tokens(token_ids[:-1]),
            decode_worker=decode,
            lease_token=reserved.lease_token,
            decode_incarnation=reserved.incarnation,
            first_token=reserved.num_cached_tokens,
            tags=tags,
            lease_s=lease_s,
        )
        answer: m.PrefillAccepted | m.Refusal = await self.bus.request(
            subjects.prefill(prefill, "run"), message, m.PrefillAccepted | m.Refusal, timeout_s=10
        )
        return answer

    async def final(self, request: str = "req-a", timeout_s: float = 20) -> StreamRecord:
        await until(lambda: RequestId(request) in self.finals, timeout_s)
        return self.finals[RequestId(request)]

    async def idle(self, workers: list[WorkerId], timeout_s: float = 20) -> None:
        """Wait until the workers' beats show nothing held and every block available."""

        def done() -> bool:
            return all(
                (b := self.beats.get(w)) is not None
                and not b.attempts
                and b.free_blocks == b.total_blocks
                and b.running + b.waiting == 0
                for w in workers
            )

        try:
            await until(done, timeout_s)
        except AssertionError:
            raise AssertionError(f"not idle: {[self.beats.get(w) for w in workers]}") from None


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.01)


@dataclass
class Cell:
    """One prefill and one decode worker in this process."""

    broker: MemoryBroker
    driver: Driver
    decode: DecodeWorker
    prefill: PrefillWorker

    @property
    def decode_id(self) -> WorkerId:
        return self.decode.shell.worker

    @property
    def prefill_id(self) -> WorkerId:
        return self.prefill.shell.worker

    async def handed_off(
        self, token_ids: list[int], *, a: Attempt | None = None, sampling: SamplingParams | None = None
    ) -> list[int]:
        """Run a request the handed-off way; its output."""
        a = a or attempt()
        reserved = await self.driver.reserve(self.decode_id, token_ids, a=a, prefill=self.prefill_id, sampling=sampling)
        assert isinstance(reserved, m.Reserved), reserved
        if reserved.num_cached_tokens < len(token_ids) - 1:
            accepted = await self.driver.run(self.prefill_id, self.decode_id, token_ids, reserved, a=a)
            assert isinstance(accepted, m.PrefillAccepted), accepted
        await self.driver.final(a.request_id)
        return self.driver.output(a.request_id)

    async def local(self, token_ids: list[int], *, a: Attempt, sampling: SamplingParams | None = None) -> list[int]:
        """Run a request locally; its output."""
        reserved = await self.driver.reserve(self.decode_id, token_ids, a=a, sampling=sampling)
        assert isinstance(reserved, m.Reserved), reserved
        await self.driver.final(a.request_id)
        return self.driver.output(a.request_id)

    async def check(self) -> None:
        """Blocks add up at both workers."""
        for shell in (self.decode.shell, self.prefill.shell):
            await shell.call(lambda batcher: batcher.check())


def options(folder: Path, **changes: object) -> WorkerOptions:
    """Small fake workers unless changed."""
    base = WorkerOptions(
        model_dir=folder / "model",
        kv_dir=folder / "kv",
        block_size=4,
        pool_bytes=64 * 16,
        token_budget=16,
        max_num_seqs=8,
        fake=True,
        fake_speed=20.0,
        calibrate=False,
        publish_interval_s=0.02,  # tokens of several steps go out together
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def shell_of(
    bus: Bus, core: WorkerEngine, worker: WorkerId, role: str, fences: Fences, tracer: Tracer | None
) -> WorkerShell:
    return WorkerShell(bus, core, worker, "default", fences, tracer, metrics=Metrics(role, models=["m"]))


def decode_worker(bus: Bus, core: WorkerEngine, worker: WorkerId, tracer: Tracer | None = None) -> DecodeWorker:
    fences = Fences()
    shell = shell_of(bus, core, worker, "decode", fences, tracer)
    return DecodeWorker(shell, fences, open_transport(shell), verify)


def prefill_worker(bus: Bus, core: WorkerEngine, worker: WorkerId, tracer: Tracer | None = None) -> PrefillWorker:
    fences = Fences()
    shell = shell_of(bus, core, worker, "prefill", fences, tracer)
    return PrefillWorker(shell, fences, verify, open_server(shell))


@contextlib.asynccontextmanager
async def cell(
    decode_options: WorkerOptions, prefill_options: WorkerOptions | None = None, tracer: Tracer | None = None
) -> AsyncIterator[Cell]:
    """Both workers and a driver, running; stopped and checked for leavings afterwards."""
    broker = MemoryBroker()
    driver = Driver(MemoryBus(broker, "driver"))
    await driver.start()
    ids = WorkerId("decode-1"), WorkerId("prefill-1")
    cores = [
        open_worker_engine(o, w) for o, w in zip((decode_options, prefill_options or decode_options), ids, strict=True)
    ]
    for core in cores:
        await asyncio.to_thread(core.start)
    decode = decode_worker(MemoryBus(broker, "decode"), cores[0], ids[0], tracer)
    prefill = prefill_worker(MemoryBus(broker, "prefill"), cores[1], ids[1], tracer)
    await prefill.start()
    await decode.start()
    running = Cell(broker, driver, decode, prefill)
    await until(lambda: set(driver.beats) == set(ids))
    try:
        yield running
    finally:
        await decode.stop(0.5)
        await prefill.stop(0.5)
        await driver.stop()
        for folder in {o.kv_dir for o in (decode_options, prefill_options or decode_options)}:
            assert list(folder.iterdir()) == [], "pool files were left"


def expected(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    return [made_up_token(seed, p, range(1000, 9000)) for p in range(len(prompt), len(prompt) + count)]


async def cancel(c: Cell, request: str, *, epoch: int = 1, dispatch: int = 1) -> m.Cancelled:
    message = m.Cancel(attempt=attempt(request, epoch, dispatch), reason="client")
    answer: m.Cancelled = await c.driver.bus.request(
        subjects.decode(c.decode_id, "cancel"), message, m.Cancelled, timeout_s=5
    )
    return answer
