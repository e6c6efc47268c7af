"""`python -m loadtest.gateway_backend`: policy, scheduler and one worker for gateways, with nothing behind them.

They speak the contracts over NATS and take no time of their own: the worker makes up tokens in steps of a given length,
all running requests in one frame a step, as a real one does. What a gateway costs can so be measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

from shared.bus.bus import Delivery
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import connect_bus
from shared.bus.streams import SETTLE_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Unauthenticated, to_wire
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import Dispatch, Incarnation, IngressId, RequestId, TenantId, Term, WorkerId
from shared.contracts.message import encode
from shared.contracts.parts import HeldAttempt, StreamRecord, Totals
from shared.contracts.tokens import completion_checksum, pack_tokens

KEY = "sk-bench"
TENANT = TenantId("bench")
WORKER = WorkerId("decode-bench")
POOL = "default"
FIRST_TOKEN, TOKENS = 1000, 2000
"""Ids it says, round and round: text of every model's vocabulary."""
BEAT_S = 1.0


@dataclass(slots=True)
class _Run:
    attempt: Attempt
    ingress: IngressId
    output: list[int]
    came: float
    sent_at: list[float] = field(default_factory=list)  # monotonic seconds, by token


class Backend:
    """What the gateways ask, on one connection. `step_s`: 0 sends all of a request's tokens at once, one a frame."""

    def __init__(self, bus: NatsBus, step_s: float) -> None:
        self._bus = bus
        self._step_s = step_s
        self._running: dict[RequestId, _Run] = {}
        self._events = 0
        self._frames = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.done: dict[RequestId, _Run] = {}

    async def start(self) -> None:
        """Listen, and begin to beat and to step."""
        bus = self._bus
        await bus.serve(subjects.POLICY_AUTHENTICATE, m.Authenticate, self._authenticate)
        await bus.serve(subjects.POLICY_ADMIT, m.Admit, self._admit)
        await bus.consume(SETTLE_STREAM, subjects.POLICY_SETTLE, m.Settle, self._settle, durable="policy")
        await bus.serve(subjects.sched_submit(POOL), m.Submit, self._submit)
        await bus.serve(subjects.decode(WORKER, "cancel"), m.Cancel, self._cancel)
        await bus.serve(subjects.decode(WORKER, "ack"), m.FinalAck, self._ack)
        for work in (self._beats(), self._steps()):
            self._tasks.add(asyncio.create_task(work))

    async def _authenticate(self, delivery: Delivery) -> m.Identity | m.Refusal:
        if delivery.message.key_hash != hashlib.sha256(KEY.encode()).digest():
            return m.Refusal(error=to_wire(Unauthenticated("the API key is not known")))
        return m.Identity(tenant=TENANT, key_id="bench")

    async def _admit(self, delivery: Delivery) -> m.Granted:
        admit: m.Admit = delivery.message
        grant = Grant(
            request_id=admit.request_id,
            tenant=TENANT,
            scope=Scope(TENANT),
            model=admit.model,
            klass="interactive",
            reservation_id="r",
            reserved_tokens=0,
            expires_s=time.time() + 600,
            budget_s=600.0,
        )
        return m.Granted(grant=SignedGrant(encode(grant), b""))

    async def _settle(self, delivery: Delivery) -> None:
        pass

    async def _submit(self, delivery: Delivery) -> m.Queued:
        submit: m.Submit = delivery.message
        count = submit.sampling[0].max_tokens
        attempt = Attempt(submit.attempt.request_id, submit.attempt.epoch, Dispatch(1))
        output = [FIRST_TOKEN + (7 * number) % TOKENS for number in range(count)]
        run = _Run(attempt, submit.ingress_id, output, time.monotonic())
        task = asyncio.create_task(self._place(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return m.Queued(term=Term(1))

    async def _place(self, run: _Run) -> None:
        self._events += 1
        event = m.Placed(
            number=self._events, attempt=run.attempt, term=Term(1), decode_worker=WORKER, local_s=0.0, path="local"
        )
        asking = self._bus.request(subjects.gateway_event(run.ingress), event, m.EventsSeen, timeout_s=5)
        if self._step_s > 0:
            await asking
            self._running[run.attempt.request_id] = run
            return
        for _ in run.output:
            await self._send(run.ingress, [self._record(run)])
        self.done[run.attempt.request_id] = run
        await asking

    def _record(self, run: _Run) -> StreamRecord:
        first = len(run.sent_at)
        run.sent_at.append(time.monotonic())
        token = pack_tokens(run.output[first : first + 1])
        if first + 1 < len(run.output):
            return StreamRecord(run.attempt, 0, first, token)
        totals = Totals(completion_tokens=len(run.output), checksum=completion_checksum(run.output))
        return StreamRecord(run.attempt, 0, first, token, "length", totals)

    async def _steps(self) -> None:
        at = time.monotonic()
        while True:
            at = max(at + self._step_s, time.monotonic() - 10 * self._step_s)
            await asyncio.sleep(max(0.0, at - time.monotonic()) if self._step_s else BEAT_S)
            records: dict[IngressId, list[StreamRecord]] = {}
            for request_id, run in list(self._running.items()):
                records.setdefault(run.ingress, []).append(self._record(run))
                if len(run.sent_at) == len(run.output):
                    self.done[request_id] = self._running.pop(request_id)
            for ingress, some in records.items():
                await self._send(ingress, some)

    async def _send(self, ingress: IngressId, records: Sequence[StreamRecord], *, listing: bool = False) -> None:
        self._frames += 1
        held = [HeldAttempt(run.attempt, (len(run.sent_at),)) for run in self._running.values()] if listing else []
        frame = m.StreamFrame(
            worker=WORKER,
            incarnation=Incarnation(1),
            number=self._frames,
            records=tuple(records),
            held=tuple(held),
            listing=listing,
        )
        if not self._bus.publish_now(subjects.stream(ingress), frame):
            await self._bus.publish(subjects.stream(ingress), frame)

    async def _beats(self) -> None:
        worker = m.WorkerBeat(
            worker=WORKER,
            role="decode",
            pool=POOL,
            incarnation=Incarnation(1),
            boot_id="bench",
            host="bench",
            number=1,
        )
        scheduler = m.SchedulerBeat(pool=POOL, term=Term(1), scheduler_id="bench")
        while True:
            await self._bus.publish(subjects.sched_beat(POOL), scheduler)
            await self._bus.publish(subjects.worker_beat(WORKER), worker)
            for ingress in {run.ingress for run in self._running.values()}:
                await self._send(ingress, (), listing=True)
            await asyncio.sleep(BEAT_S)

    async def _cancel(self, delivery: Delivery) -> m.Cancelled:
        return m.Cancelled(held=self._running.pop(delivery.message.attempt.request_id, None) is not None)

    async def _ack(self, delivery: Delivery) -> m.FinalAcked:
        return m.FinalAcked()


async def _serve(step_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with connect_bus(os.environ["NATS_URL"], "bench") as bus:
        backend = Backend(bus, step_s)
        await backend.start()
        # a stand-in: nothing of it may wait for its own garbage collector
        gc.freeze()
        gc.disable()
        print("ready", flush=True)
        await stop.wait()
        json.dump({request_id: [run.came, *run.sent_at] for request_id, run in backend.done.items()}, sys.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=0.0, help="length of a step; 0: everything at once")
    uvloop.run(_serve(parser.parse_args().step_ms / 1e3))
