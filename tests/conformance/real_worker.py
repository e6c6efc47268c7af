"""A gateway before real decode workers with a tiny model, all in this process; policy and scheduler are stand-ins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from services.decode.service import DecodeWorker
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.grants import Grant
from shared.contracts.ids import Dispatch, Incarnation, Term, WorkerId
from shared.contracts.message import decode
from shared.contracts.sampling import SamplingParams
from shared.engine.worker_engine import WorkerOptions, open_worker_engine
from tests.pipeline.gateway_support import TOKENIZER, Backend, Stack, gateway_stack
from tests.pipeline.worker_support import SIGNER, decode_worker, options
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import CHATML, tokenizer_json

VOCABULARY = TOKENIZER.vocab_size


def tiny_checkpoint(folder: Path, **changes: Any) -> Path:
    """A random model with the tests' tokenizer."""
    make_tiny_model(folder, **{"vocab_size": VOCABULARY, "eos_token_id": 2} | changes)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    texts = {"chat_template": CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder


def real_options(folder: Path, model: Path, **changes: Any) -> WorkerOptions:
    """Plain float32 on one thread."""
    settings = {
        "model_dir": model,
        "fake": False,
        "block_size": 16,
        "pool_bytes": 8 * 1024 * 1024,
        "token_budget": 64,
        "max_num_seqs": 32,
        "threads": 1,
        "kernels": "reference",
        "self_check": False,
    }
    return options(folder, **settings | changes)


@dataclass
class RealBackend(Backend):
    """Places every request on the first worker that lives, and loses workers when told."""

    workers: list[DecodeWorker] = field(default_factory=list)
    reserves: list[m.Reserve] = field(default_factory=list)
    refusals: list[m.Refusal] = field(default_factory=list)
    prediction: bytes = b""  # that every request comes with

    async def serve_worker(self, worker: WorkerId) -> None:
        """The real ones answer."""

    async def _admit(self, delivery: Delivery) -> m.Granted | m.Refusal:
        answer = await super()._admit(delivery)
        if isinstance(answer, m.Refusal):
            return answer
        return msgspec.structs.replace(answer, grant=SIGNER.sign(decode(answer.grant.payload, Grant)))

    async def _place(self, submit: m.Submit) -> None:
        worker = self.workers[0].shell.worker
        attempt = Attempt(submit.attempt.request_id, submit.attempt.epoch, Dispatch(1))
        reserve = m.Reserve(
            attempt=attempt,
            term=Term(1),
            ingress_id=submit.ingress_id,
            grant=submit.grant,
            token_ids=submit.token_ids,
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=tuple(self._predicted(params) for params in submit.sampling),
        )
        self.reserves.append(reserve)
        answer: m.Reserved | m.Refusal
        while True:
            answer = await self.bus.request(
                subjects.decode(worker, "reserve"), reserve, m.Reserved | m.Refusal, timeout_s=20
            )
            if not isinstance(answer, m.Refusal) or answer.never:
                break
            await asyncio.sleep(0.02)
        self.events += 1
        event: Any
        if isinstance(answer, m.Refusal):
            self.refusals.append(answer)
            event = m.PlacementRefused(number=self.events, attempt=attempt, error=answer.error)
        else:
            event = m.Placed(
                number=self.events, attempt=attempt, term=Term(1), decode_worker=worker, local_s=0.1, path="local"
            )
        await self._tell(event)

    def _predicted(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, prediction=self.prediction) if self.prediction else params

    async def _beats(self) -> None:
        while True:
            beat = m.SchedulerBeat(pool="default", term=Term(1), scheduler_id="s")
            await self.bus.publish(subjects.sched_beat("default"), beat)
            await asyncio.sleep(0.1)

    async def lose_first_worker(self) -> None:
        """It is silent from here on; the next one takes its requests."""
        lost = self.workers.pop(0)
        await lost.stop(0.0)
        self.events += 1
        incarnation = Incarnation(1)
        await self._tell(
            m.WorkerLost(number=self.events, worker=lost.shell.worker, incarnation=incarnation, reason="exit")
        )


@asynccontextmanager
async def real_stack(worker_options: WorkerOptions, num_workers: int = 1, **config: Any) -> AsyncIterator[Stack]:
    """The gateway of `gateway_stack` with real workers behind it."""
    broker = MemoryBroker()
    backend = RealBackend(broker)
    async with AsyncExitStack() as running:
        for number in range(1, num_workers + 1):
            worker = WorkerId(f"decode-{number}")
            core = await asyncio.to_thread(open_worker_engine, worker_options, worker)
            await asyncio.to_thread(core.start)
            service = decode_worker(MemoryBus(broker, f"decode-{number}"), core, worker)
            await service.start()
            backend.workers.append(service)
        stack = await running.enter_async_context(gateway_stack(backend, **config))
        try:
            yield stack
        finally:
            for service in backend.workers:
                await service.stop(2.0)
