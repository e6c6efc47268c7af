"""Two workers with a real, tiny model and no memory in common, as on two machines: KV goes over TCP."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.parts import Totals
from shared.contracts.sampling import SamplingParams
from shared.engine.worker_engine import WorkerOptions
from shared.kv.handoff import Pull
from shared.kv.transfer import PullResult, Transport
from shared.kv.transfer_options import TransferOptions
from shared.telemetry import metric_names as names
from tests.certificates import Authority
from tests.pipeline.worker_support import Cell, attempt, cell, until
from tests.tiny_models import make_tiny_model

PROMPT = [(7 * i + 3) % 320 for i in range(75)]
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def apart(
    model_dir: Path, folder: Path, decode: TransferOptions | None = None, prefill: TransferOptions | None = None
) -> AsyncIterator[Cell]:
    """A cell whose workers have pools in folders of their own."""
    options = WorkerOptions(
        model_dir=model_dir,
        kv_dir=folder / "kv-decode",
        block_size=16,
        pool_bytes=4 << 20,
        token_budget=48,
        chunk_size=16,
        max_num_seqs=8,
        threads=1,
        self_check=False,
        calibrate=False,
        transfer=decode or TransferOptions(),
    )
    source = dataclasses.replace(options, kv_dir=folder / "kv-prefill", transfer=prefill or TransferOptions())
    async with cell(options, source) as running:
        yield running
        await running.driver.idle([running.decode_id, running.prefill_id], 30)
        await running.check()
        server = running.prefill._server
        assert server is None or len(server.leases) == 0


async def handed_off(c: Cell, name: str, length: int = len(PROMPT)) -> tuple[list[int], Totals]:
    output = await c.handed_off(PROMPT[:length], a=attempt(name), sampling=SAMPLED)
    totals = c.driver.finals[attempt(name).request_id].totals
    assert totals is not None
    return output, totals


@pytest.mark.parametrize("tls", [False, True])
async def test_over_tcp_equals_local(model_dir: Path, tmp_path: Path, tls: bool) -> None:
    files = [Authority(tmp_path / "authority")] if tls else []
    ends = [TransferOptions(cert=f.cert, key=f.key, ca=f.ca) for a in files for f in (a.worker("d"), a.worker("p"))]
    async with apart(model_dir, tmp_path, *ends) as c:
        for length in (2, 16, 17, 33, 75):
            local = await c.local(PROMPT[:length], a=attempt(f"req-l{length}"), sampling=SAMPLED)
            output, totals = await handed_off(c, f"req-h{length}", length)
            assert output == local, f"prompt of {length}"
            assert totals.received_tokens == length - 1
        assert c.decode.shell.beat().links == (), "too little to measure a rate by"
        await until(lambda: _reads(c, "served") >= 5, 30)


@pytest.mark.parametrize("end", ["decode", "prefill"])
async def test_where_tcp_is_not_allowed_the_prompt_is_computed_again(model_dir: Path, tmp_path: Path, end: str) -> None:
    async with apart(model_dir, tmp_path, **{end: TransferOptions(transfer="shared-memory")}) as c:
        local = await c.local(PROMPT, a=attempt("req-l"), sampling=SAMPLED)
        output, totals = await handed_off(c, "req-h")
        assert output == local
        assert totals.received_tokens == 0
        assert _failures(c, "pool_unreadable") == 1
        assert c.decode.shell.beat().links[0].failed


class Held:
    """A transport that waits before the pull named until the test lets it go on."""

    path = "held"

    def __init__(self, inner: Transport, number: int) -> None:
        self._inner = inner
        self._left = number
        self.reached, self.go = threading.Event(), threading.Event()

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            self.go.wait(60)
        return self._inner.pull(pull, tables, source_blocks)

    def drop_dead(self) -> None:
        self._inner.drop_dead()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize(("loss", "reason"), [("lease", "transfer_refused"), ("server", "transfer_unreachable")])
async def test_a_source_that_is_lost_between_pulls(model_dir: Path, tmp_path: Path, loss: str, reason: str) -> None:
    async with apart(model_dir, tmp_path) as c:
        server, handoff = c.prefill._server, c.decode.book.handoff
        assert server is not None
        local = await c.local(PROMPT, a=attempt("req-l"), sampling=SAMPLED)
        handoff._transport = held = Held(handoff._transport, 1)
        running = asyncio.create_task(handed_off(c, "req-h"))
        assert await asyncio.to_thread(held.reached.wait, 30)
        if loss == "lease":
            server.leases.close(attempt("req-h"), lambda: None)
        else:
            await asyncio.to_thread(server.stop)
        held.go.set()
        output, totals = await running
        assert output == local
        assert totals.received_tokens == 0
        assert _failures(c, reason) == 1


class Silent:
    """A transport to a peer that takes requests and says nothing, until the test has waited long enough."""

    path = "tcp"

    def __init__(self, result: PullResult | None = None, inner: Transport | None = None) -> None:
        self._result, self._inner = result, inner
        self.asked: list[Pull] = []
        self.over = threading.Event()

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        self.asked.append(pull)
        self.over.wait(60)
        if self._inner is not None:
            return self._inner.pull(pull, tables, source_blocks)
        assert self._result is not None
        return self._result

    def drop_dead(self) -> None:
        pass

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


@pytest.mark.parametrize("reason", ["transfer_timed_out", "transfer_unreachable"])
async def test_who_waits_behind_a_pull_that_a_silent_peer_fails_goes_on_at_once(
    model_dir: Path, tmp_path: Path, reason: str
) -> None:
    async with apart(model_dir, tmp_path) as c:
        handoff = c.decode.book.handoff
        local = await c.local(PROMPT, a=attempt("req-l"), sampling=SAMPLED)
        inner = handoff._transport
        handoff._transport = silent = Silent(PullResult(error=f"{reason}: nothing came", path="tcp"))
        running = [asyncio.create_task(handed_off(c, f"req-{number}")) for number in range(3)]
        await until(lambda: _queued(c) == 2, 30)
        silent.over.set()
        for output, totals in await asyncio.gather(*running):
            assert output == local
            assert totals.received_tokens == 0
        assert len(silent.asked) == 1
        assert _failures(c, reason) == 3
        assert c.decode.shell.beat().links[0].failed
        handoff._transport = inner
        _, totals = await handed_off(c, "req-later")
        assert totals.received_tokens > 0, "a peer that is asked later is tried again"


async def test_a_pull_whose_request_ended_before_its_turn_is_not_made(model_dir: Path, tmp_path: Path) -> None:
    async with apart(model_dir, tmp_path) as c:
        handoff = c.decode.book.handoff
        handoff._transport = slow = Silent(inner=handoff._transport)
        first = asyncio.create_task(handed_off(c, "req-a"))
        await until(lambda: len(slow.asked) == 1, 30)
        reserved = await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-b"), prefill=c.prefill_id)
        assert isinstance(reserved, m.Reserved)
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved, a=attempt("req-b"))
        await until(lambda: _queued(c) == 1, 30)
        cancel = m.Cancel(attempt=attempt("req-b"))
        answer = await c.driver.bus.request(subjects.decode(c.decode_id, "cancel"), cancel, m.Cancelled, timeout_s=30)
        assert answer.held
        slow.over.set()
        _, totals = await first
        assert totals.received_tokens == len(PROMPT) - 1
        assert {pull.attempt for pull in slow.asked} == {attempt("req-a")}


def _queued(c: Cell) -> int:
    """Pulls of the prefill worker's that wait for their turn."""
    return c.decode.book.handoff._thread(str(c.prefill_id))._work_queue.qsize()


def _reads(c: Cell, outcome: str) -> float:
    return c.prefill.shell.metrics.value(names.KV_READS, model="m", outcome=outcome)


def _failures(c: Cell, reason: str) -> float:
    return c.decode.shell.metrics.value(names.HANDOFF_FAILURES, model="m", reason=reason)
