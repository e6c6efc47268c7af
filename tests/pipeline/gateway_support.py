"""A gateway on the memory bus, with small policy, scheduler and worker stand-ins that speak the contracts.

The worker "generates" a text chosen by the test, a byte a token, so what clients must see is known exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp

from services.gateway.app import Door, build_app
from services.gateway.server import bind, serve
from services.gateway.service import GatewayService
from services.gateway.settings import GatewayConfig
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import SETTLE_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError, Unauthenticated, to_wire
from shared.contracts.grants import Grant, Limits, Scope, SignedGrant
from shared.contracts.ids import Dispatch, Incarnation, IngressId, RequestId, TenantId, Term, WorkerId
from shared.contracts.message import encode
from shared.contracts.parts import HeldAttempt, StreamRecord, Totals
from shared.contracts.tokens import completion_checksum, pack_tokens, unpack_tokens
from shared.ingress.config import IngressConfig
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from shared.telemetry.setup import Telemetry
from tests import openai_oracle
from tests.tiny_tokenizer import tiny_tokenizer

MODEL = "tiny"
GATEWAY = IngressId("gateway-1")
FIRST_WORKER = WorkerId("decode-1")
KEYS = {"key-a": "tenant-a", "key-a2": "tenant-a", "key-b": "tenant-b", "key-admin": "admin"}
HEADERS = {"authorization": "Bearer key-a"}
TOKENIZER = tiny_tokenizer()
EOS = 2
CONTEXT = 512


def default_output(prompt: str) -> str:
    return "one two three four five six seven eight nine ten, said ď 龜 🫠 👨‍👩‍👧 ש!"


@dataclass
class Running:
    """A request in the fake worker."""

    submit: m.Submit
    attempt: Attempt
    output: list[int]
    finish: str
    sent: int = 0
    cut: int | None = None
    cancelled: str = ""
    acked: bool = False

    def totals(self) -> Totals:
        made = self.output if self.cut is None else self.output[: self.cut]
        return Totals(
            prompt_tokens=self.submit.num_prompt_tokens,
            cached_tokens=3,
            completion_tokens=len(made),
            checksum=completion_checksum(made),
        )


@dataclass
class Backend:
    """policy, scheduler and one decode worker. Knobs first, then what they saw."""

    broker: MemoryBroker
    ingress: IngressId = GATEWAY
    text: Callable[[str], str] = default_output
    tokens_per_frame: int = 2
    step_s: float = 0.0
    policy_refuses: BatonError | None = None
    scheduler_refuses: BatonError | None = None
    refuse_placement: BatonError | None = None
    hold: asyncio.Event | None = None
    """Frames wait for it after the first."""
    held_prompts: dict[str, asyncio.Event] = field(default_factory=dict)
    """The same for single prompts."""
    drop_every: int = 0
    """Every so many-th frame is lost; the listing shows it."""
    limits: Limits = field(default_factory=Limits)
    policy: bool = True
    """False: somebody else answers for policy."""
    worker: WorkerId = FIRST_WORKER
    admits: list[m.Admit | m.AdmitTenant] = field(default_factory=list)
    submits: list[m.Submit] = field(default_factory=list)
    settles: list[m.Settle] = field(default_factory=list)
    running: dict[RequestId, Running] = field(default_factory=dict)
    cancels: list[m.Cancel] = field(default_factory=list)
    finishes: list[m.Finish] = field(default_factory=list)
    withdrawals: list[m.Withdraw] = field(default_factory=list)
    authentications: int = 0
    frames: int = 0
    events: int = 0
    mute: bool = False
    """The worker is dead: it sends and answers nothing."""
    hops: list[Any] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Backend]:
        self.bus = MemoryBus(self.broker, "backend")
        bus = self.bus
        if self.policy:
            await self._serve_policy()
        await bus.serve(subjects.sched_submit("default"), m.Submit, self._submit)
        await bus.subscribe(subjects.sched_withdraw("default"), m.Withdraw, self._on_withdraw)
        await self.serve_worker(self.worker)
        self._spawn(self._beats())
        yield self
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await bus.close()

    async def _serve_policy(self) -> None:
        bus = self.bus
        await bus.serve(subjects.POLICY_AUTHENTICATE, m.Authenticate, self._authenticate)
        await bus.serve(subjects.POLICY_ADMIT, m.Admit, self._admit)
        await bus.serve(subjects.POLICY_ADMIT_TENANT, m.AdmitTenant, self._admit)
        await bus.consume(SETTLE_STREAM, subjects.POLICY_SETTLE, m.Settle, self._settle, durable="policy")

    async def serve_worker(self, worker: WorkerId) -> None:
        self.worker = worker
        bus = self.bus
        self.hops = [
            await bus.serve(subjects.decode(worker, "cancel"), m.Cancel, self._cancel),
            await bus.serve(subjects.decode(worker, "finish"), m.Finish, self._finish),
            await bus.serve(subjects.decode(worker, "replay"), m.StreamReplay, self._replay),
            await bus.serve(subjects.decode(worker, "ack"), m.FinalAck, self._ack),
        ]

    # ---------------------------------------------------------------------------------------- policy

    async def _authenticate(self, delivery: Delivery) -> m.Identity | m.Refusal:
        self.authentications += 1
        for key, tenant in KEYS.items():
            if hashlib.sha256(key.encode()).digest() == delivery.message.key_hash:
                return m.Identity(tenant=TenantId(tenant), key_id=key, admin=tenant == "admin", limits=self.limits)
        return m.Refusal(error=to_wire(Unauthenticated("the API key is not known")))

    async def _admit(self, delivery: Delivery) -> m.Granted | m.Refusal:
        admit: m.Admit | m.AdmitTenant = delivery.message
        self.admits.append(admit)
        if self.policy_refuses is not None:
            return m.Refusal(error=to_wire(self.policy_refuses))
        batch = isinstance(admit, m.AdmitTenant)
        tenant = admit.tenant if isinstance(admit, m.AdmitTenant) else TenantId("tenant")
        grant = Grant(
            request_id=admit.request_id,
            tenant=tenant,
            scope=Scope(tenant),
            model=admit.model,
            klass="batch" if batch else "interactive",
            reservation_id="" if batch else "r",
            reserved_tokens=0,
            expires_s=time.time() + 60,
            budget_s=60.0,
            limits=self.limits,
        )
        return m.Granted(grant=SignedGrant(encode(grant), b""), default_max_tokens=7 if batch else 0)

    async def _settle(self, delivery: Delivery) -> None:
        self.settles.append(delivery.message)

    # ---------------------------------------------------------------------------------------- scheduler

    async def _submit(self, delivery: Delivery) -> m.Queued | m.Refusal:
        submit: m.Submit = delivery.message
        self.submits.append(submit)
        if self.scheduler_refuses is not None:
            return m.Refusal(error=to_wire(self.scheduler_refuses))
        self._spawn(self._place(submit))
        return m.Queued(term=Term(1))

    def _on_withdraw(self, delivery: Delivery) -> None:
        self.withdrawals.append(delivery.message)

    async def _place(self, submit: m.Submit) -> None:
        attempt = Attempt(submit.attempt.request_id, submit.attempt.epoch, Dispatch(1))
        self.events += 1
        event: Any
        if self.refuse_placement is not None:
            event = m.PlacementRefused(number=self.events, attempt=attempt, error=to_wire(self.refuse_placement))
        else:
            event = m.Placed(
                number=self.events, attempt=attempt, term=Term(1), decode_worker=self.worker, local_s=0.1, path="local"
            )
        await self._tell(event)
        if self.refuse_placement is None:
            await self._generate(submit, attempt)

    async def sent(self, count: int = 1) -> None:
        """Returns when some request has sent `count` tokens."""
        async with asyncio.timeout(5):
            while not any(run.sent >= count for run in self.running.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    async def lose_worker(self, *, told: bool = True) -> None:
        """The worker dies and another takes its place; `told`: the scheduler says so."""
        self.mute = True
        for hop in self.hops:
            await hop.stop()
        self.events += 1
        event = m.WorkerLost(number=self.events, worker=self.worker, incarnation=Incarnation(1), reason="exit")
        self.worker = WorkerId(f"decode-{int(self.worker.rpartition('-')[2]) + 1}")
        self.running = {k: r for k, r in self.running.items() if r.acked}
        await self.serve_worker(self.worker)
        await asyncio.sleep(0.02)  # the dead worker's generators see `mute`
        self.mute = False
        if told:
            await self._tell(event)

    async def _tell(self, event: Any) -> None:
        await self.bus.request(subjects.gateway_event(self.ingress), event, m.EventsSeen, timeout_s=5)

    # ---------------------------------------------------------------------------------------- worker

    async def _generate(self, submit: m.Submit, attempt: Attempt) -> None:
        ids = unpack_tokens(submit.token_ids)
        prompt = TOKENIZER.decode(ids[: submit.num_prompt_tokens])
        whole = [*TOKENIZER.encode(self.text(prompt)), EOS]
        limit = submit.sampling[0].max_tokens
        finish = "length" if len(whole) > limit else "stop"
        run = Running(submit, attempt, whole[:limit], finish, sent=len(ids) - submit.num_prompt_tokens)
        self.running[attempt.request_id] = run
        while run.sent < len(run.output):
            await asyncio.sleep(self.step_s)
            hold = self.held_prompts.get(prompt, self.hold)
            if hold is not None and run.sent:
                await hold.wait()
            if run.cancelled or run.cut is not None or self.mute or self.running.get(attempt.request_id) is not run:
                return
            first = run.sent
            run.sent = min(len(run.output), first + self.tokens_per_frame)
            await self._send(*self._records(run, first))
        while not run.acked and not run.cancelled and run.cut is None and not self.mute:
            await asyncio.sleep(0.05)
            await self._send(*self._records(run, len(run.output)))

    def _records(self, run: Running, first: int) -> list[StreamRecord]:
        """Every choice says the same."""
        return [self._record(run, first, choice) for choice in range(len(run.submit.sampling))]

    def _record(self, run: Running, first: int, choice: int) -> StreamRecord:
        last = run.sent == len(run.output)
        packed = pack_tokens(run.output[first : run.sent])
        totals = run.totals() if last else None
        return StreamRecord(run.attempt, choice, first, packed, run.finish if last else "", totals)

    async def _send(self, *records: StreamRecord, held: Sequence[HeldAttempt] = (), listing: bool = False) -> None:
        self.frames += 1
        if self.drop_every and not listing and self.frames % self.drop_every == 0:
            return
        frame = m.StreamFrame(
            worker=self.worker,
            incarnation=Incarnation(1),
            number=self.frames,
            records=records,
            held=tuple(held),
            listing=listing,
        )
        await self.bus.publish(subjects.stream(self.ingress), frame)

    async def _beats(self) -> None:
        while True:
            await self.bus.publish(
                subjects.sched_beat("default"), m.SchedulerBeat(pool="default", term=Term(1), scheduler_id="s")
            )
            if not self.mute:
                beat = m.WorkerBeat(
                    worker=self.worker,
                    role="decode",
                    pool="default",
                    incarnation=Incarnation(1),
                    boot_id="b",
                    host="h",
                    number=1,
                )
                await self.bus.publish(subjects.worker_beat(self.worker), beat)
                held = [
                    HeldAttempt(run.attempt, (run.sent,) * len(run.submit.sampling))
                    for run in self.running.values()
                    if not run.acked and not run.cancelled
                ]
                await self._send(held=held, listing=True)
            await asyncio.sleep(0.1)

    def _find(self, attempt: Attempt) -> Running | None:
        run = self.running.get(attempt.request_id)
        return run if run is not None and run.attempt <= attempt else None

    async def _cancel(self, delivery: Delivery) -> m.Cancelled:
        self.cancels.append(delivery.message)
        run = self._find(delivery.message.attempt)
        if run is None:
            return m.Cancelled(held=False)
        run.cancelled = delivery.message.reason
        return m.Cancelled(held=True, totals=run.totals())

    async def _finish(self, delivery: Delivery) -> m.Finished:
        finish: m.Finish = delivery.message
        self.finishes.append(finish)
        run = self._find(finish.attempt)
        if run is None:
            return m.Finished(held=False)
        run.cut = finish.num_tokens
        return m.Finished(held=True, totals=run.totals())

    async def _replay(self, delivery: Delivery) -> m.StreamReplayed:
        ask: m.StreamReplay = delivery.message
        run = self._find(ask.attempt)
        if run is None:
            return m.StreamReplayed(held=False)
        return m.StreamReplayed(held=True, records=(self._record(run, ask.from_seq, ask.choice),))

    async def _ack(self, delivery: Delivery) -> m.FinalAcked:
        for attempt in delivery.message.attempts:
            if (run := self._find(attempt)) is not None:
                run.acked = True
        return m.FinalAcked()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass
class Stack:
    """A running gateway and what is behind it."""

    app: ASGIApp
    door: Door
    service: GatewayService
    backend: Backend
    client: httpx.AsyncClient

    async def settled(self, count: int = 1) -> list[m.Settle]:
        """The settlements, once there are `count` and the gateway is idle."""
        for _ in range(200):
            if len(self.backend.settles) >= count and not self.service.ingress.sessions:
                break
            await asyncio.sleep(0.02)
        assert not self.service.ingress.sessions
        assert len(self.backend.settles) == count
        return self.backend.settles


@asynccontextmanager
async def gateway_stack(backend: Backend | None = None, **config: Any) -> AsyncIterator[Stack]:
    """A gateway in this process, its client through ASGI."""
    broker = MemoryBroker() if backend is None else backend.broker
    backend = backend or Backend(broker)
    bus = MemoryBus(broker, "gateway")
    context = config.pop("context", CONTEXT)
    names = ("max_body_bytes", "body_timeout_s", "probe_key", "keep_alive_s", "edge")
    http = {name: config.pop(name) for name in names if name in config}
    options = {"tick_s": 0.05, "beat_s": 0.05, "drain_s": 0.5, "hop_timeout_s": 2.0, **config}
    settings = GatewayConfig(ingress=IngressConfig(GATEWAY, "gateway", **options), **http)
    models = ServedModels([ServedModel(MODEL, "default", context, PromptCodec(TOKENIZER, context))])
    async with backend.run(), Telemetry("gateway", bus) as telemetry:
        async with GatewayService(bus, settings, telemetry, models) as service:
            await asyncio.sleep(0.05)
            door = Door(service)
            app = build_app(door)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            client = httpx.AsyncClient(
                transport=transport,
                base_url="http://gateway",
                timeout=30,
                event_hooks={"response": [openai_oracle.hold]},
            )
            async with client:
                yield Stack(app, door, service, backend, client)
        await telemetry.flush()
        await bus.close()
        models.close()


@asynccontextmanager
async def http_stack(
    backend: Backend | None = None, send_buffer: int = 0, **config: Any
) -> AsyncIterator[tuple[Stack, str]]:
    """The same behind uvicorn on a free port; yields the base URL too."""
    sock = bind("127.0.0.1", 0)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    async with gateway_stack(backend, **config) as stack, serve(stack.app, sock, stack.service.config.edge) as listener:
        yield stack, f"http://127.0.0.1:{listener.port}"


def chat(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def completion(prompt: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **more}
