"""A prefill worker that is stopped across its lease and then goes on harms nobody. Real processes, a real server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.bus.nats_connection import connect_bus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.fake_runner import made_up_token
from shared.lifecycle.ready import READY_VARIABLE, read_ready
from shared.security.grant_signature import public_pem
from tests.pipeline.worker_support import SIGNER, Driver, attempt, until
from tests.servers import start_nats, wait_for

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 2.0
PROMPT = [200 + i % 300 for i in range(3000)]
SAMPLING = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
EXPECTED = [made_up_token(5, p, range(1000, 9000)) for p in range(len(PROMPT), len(PROMPT) + 12)]


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    id: WorkerId


@contextlib.contextmanager
def worker(role: str, folder: Path, nats_url: str) -> Iterator[Worker]:
    """A fake worker as a process of its own; stopped by SIGTERM, and must then end by itself."""
    keys, ready, log = folder / "grant.pem", folder / f"{role}.ready", folder / f"{role}.log"
    keys.write_bytes(public_pem(SIGNER.public_key))
    keys.chmod(0o600)
    env = {
        **os.environ,
        "NATS_URL": nats_url,
        "BATON_KV_DIR": str(folder / "kv"),
        "BATON_KV_POOL_BYTES": str(4 * 1024 * 1024),
        "BATON_WORKERS_FAKE": "true",
        "BATON_GRANT_PUBLIC_KEY_FILE": str(keys),
        READY_VARIABLE: str(ready),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{role}"], cwd=ROOT, env=env, stdout=out, stderr=out
        )
    try:
        facts = wait_for(lambda: read_ready(ready), process, log)
        assert facts["fake"] is True
        yield Worker(process, WorkerId(facts["worker"]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0, log.read_text()[-3000:]
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


@contextlib.asynccontextmanager
async def driver(url: str) -> AsyncIterator[Driver]:
    async with connect_bus(url, "driver") as bus:
        playing = Driver(bus)
        await playing.start()
        yield playing
        await playing.stop()


async def hand_off(d: Driver, decode: Worker, prefill: Worker, dispatch: int, request: str) -> None:
    a = attempt(request, dispatch=dispatch)
    reserved = await d.reserve(decode.id, PROMPT, a=a, prefill=prefill.id, sampling=SAMPLING, lease_s=LEASE_S)
    assert isinstance(reserved, m.Reserved)
    accepted = await d.run(prefill.id, decode.id, PROMPT, reserved, a=a, lease_s=LEASE_S)
    assert isinstance(accepted, m.PrefillAccepted), accepted


@pytest.mark.timeout(60)
async def test_a_stopped_prefill_worker_harms_nobody(tmp_path: Path) -> None:
    nats = start_nats(tmp_path / "nats")
    try:
        with worker("prefill", tmp_path, nats.url) as prefill, worker("decode", tmp_path, nats.url) as decode:
            async with driver(nats.url) as d:
                await stopped_across_the_lease(d, decode, prefill)
        # Marks of pools that are gone wait for a policy, which is not here
        left = {file.name for file in (tmp_path / "kv").iterdir()}
        assert left == {f"{one.id}.wiped" for one in (prefill, decode)}
    finally:
        nats.kill(signal.SIGTERM)


async def stopped_across_the_lease(d: Driver, decode: Worker, prefill: Worker) -> None:
    await until(lambda: {decode.id, prefill.id} <= set(d.beats), 30)
    commits: list[m.HandoffCommit] = []
    releases: list[m.HandoffRelease] = []
    await d.bus.subscribe(subjects.handoff(decode.id, "commit"), m.HandoffCommit, lambda x: commits.append(x.message))
    await d.bus.subscribe(
        subjects.handoff(prefill.id, "release"), m.HandoffRelease, lambda x: releases.append(x.message)
    )

    # Given: a hand-off of which a part has come
    await hand_off(d, decode, prefill, 1, "req-a")
    await until(lambda: any(p.computed_tokens > 0 for p in d.beats[decode.id].attempts), 30)
    assert not commits[-1].last

    # When: the prefill worker stands still across its lease
    prefill.process.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    final = await d.final("req-a", 20)

    # Then: the decode worker went on alone, from what had come
    assert d.output("req-a") == EXPECTED
    assert time.monotonic() - stopped_at > LEASE_S * 0.5
    assert final.totals is not None
    assert 0 < final.totals.received_tokens < len(PROMPT) - 1
    assert any(r.reason == "prefill_lease" for r in releases)

    # And: when it goes on, its late commits change nothing, and both end up idle
    prefill.process.send_signal(signal.SIGCONT)
    await d.bus.publish(subjects.handoff(decode.id, "commit"), commits[-1])
    await until(lambda: any(r.reason == "fenced" for r in releases), 30)
    await d.idle([decode.id, prefill.id], 15)
    assert d.output("req-a") == EXPECTED

    # And: it hands over the next request as if nothing had been
    await hand_off(d, decode, prefill, 1, "req-b")
    final = await d.final("req-b", 20)
    assert d.output("req-b") == EXPECTED
    assert final.totals is not None
    assert final.totals.received_tokens == len(PROMPT) - 1
    await d.idle([decode.id, prefill.id], 15)
