"""What stands still is found: engines by their counter, children by their marks, services by their beats."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx

from services.cli.heartbeats import Heartbeats
from services.cli.supervisor import Supervisor
from services.cli.topology import ready_time
from shared.contracts.ids import WorkerId
from shared.engine.stall import StallClock
from shared.ingress.liveness import Liveness, scheduler_of
from shared.lifecycle.watchdog import Watchdog
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import serve_metrics
from tests.unit.test_supervisor import READY, alive, spec, until


def test_an_engine_stands_still_when_its_counter_does_for_longer_than_a_step() -> None:
    clock = StallClock(10.0)
    assert not clock.look(5, 0.1, 100.0)
    assert not clock.look(5, 0.1, 109.9)
    assert clock.look(5, 0.1, 110.0)
    assert clock.still_s == 10.0
    assert not clock.look(5, 3.0, 111.0)  # a step may take 3 s, so 12 s say something
    assert clock.look(5, 3.0, 112.0)
    assert not clock.look(6, 0.1, 113.0)


def test_a_child_stands_still_when_its_mark_does() -> None:
    beats = Heartbeats(10.0)
    assert beats.still({1: 7.0, 2: 7.0}, 0.0) == []
    for second in range(1, 10):
        assert beats.still({1: 7.0, 2: 7.0 + second}, second) == []
    assert beats.still({1: 7.0, 2: 17.0}, 10.0) == [1]
    assert beats.still({2: 18.0}, 11.0) == []
    assert beats.still({1: 7.0, 2: 18.0}, 12.0) == []  # a new one, as nothing was known of it


def test_nobody_is_blamed_for_time_in_which_we_did_not_look() -> None:
    beats = Heartbeats(10.0)
    beats.still({1: 7.0}, 0.0)
    assert beats.still({1: 7.0}, 60.0) == []
    assert beats.still({1: 7.0}, 64.0) == []


def test_readiness_needs_a_decode_worker_that_serves_in_every_pool() -> None:
    liveness = Liveness(5.0, ("small", "large"))
    for pool in ("small", "large"):
        liveness.heard_service(scheduler_of(pool), 0.0)
    liveness.heard_service("policy", 0.0)
    liveness.decoder_beat(WorkerId("s1"), "small", serves=True, now=0.0)
    assert not liveness.checks(1.0, token_wanted=False)["decode"]
    liveness.decoder_beat(WorkerId("l1"), "large", serves=True, now=0.0)
    liveness.decoder_beat(WorkerId("l2"), "large", serves=True, now=0.0)
    assert all(liveness.checks(1.0, token_wanted=False).values())
    liveness.decoder_beat(WorkerId("l1"), "large", serves=False, now=1.0)  # it drains, or its engine stands still
    assert liveness.checks(1.0, token_wanted=False)["decode"]
    liveness.decoder_beat(WorkerId("l2"), "large", serves=False, now=1.0)
    assert not liveness.checks(1.0, token_wanted=False)["decode"]
    liveness.decoder_beat(WorkerId("l2"), "large", serves=True, now=2.0)
    assert liveness.checks(2.0, token_wanted=False)["decode"]
    liveness.heard_service(scheduler_of("small"), 6.0)
    assert not liveness.checks(6.0, token_wanted=False)["scheduler"]  # the other pool's is silent


async def test_liveness_says_what_stands_still() -> None:
    faults: list[str] = []
    watchdog = Watchdog(None, 0.0, lambda: True)
    watchdog.watch(lambda: "".join(faults))
    async with serve_metrics(Metrics("decode"), "127.0.0.1", 0, watchdog.fault) as port, httpx.AsyncClient() as client:
        fine = await client.get(f"http://127.0.0.1:{port}/health")
        assert (fine.status_code, fine.text) == (200, "alive\n")
        faults.append("the engine has ended no step for 12 s")
        bad = await client.get(f"http://127.0.0.1:{port}/health")
        assert (bad.status_code, bad.text) == (503, "the engine has ended no step for 12 s\n")


async def test_the_ready_file_is_set_anew_while_nothing_stands_still_and_it_is_ours(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.write_text("{}")
    faults, ours = [""], [True]
    watchdog = Watchdog(ready, 0.0, lambda: ours[0])
    watchdog.watch(lambda: faults[0])
    for fault, is_ours, touched in (("", True, True), ("stuck", True, False), ("", False, False)):
        faults[0], ours[0] = fault, is_ours
        os.utime(ready, (1.0, 1.0))
        watchdog.start()
        await asyncio.sleep(0.05)
        watchdog.stop()
        watchdog._turning = None
        assert (ready.stat().st_mtime > 1.0) is touched


async def test_a_child_that_is_stopped_for_too_long_is_killed_and_started_again(tmp_path: Path) -> None:
    # Given a child that sets its ready file anew
    turning = f"{READY}import os, time\nwhile True: os.utime(os.environ['BATON_READY_FILE']); time.sleep(0.1)\n"
    child = spec(tmp_path, "turning", turning, mark=ready_time(tmp_path / "turning.ready"))
    lines: list[str] = []
    supervisor = Supervisor(lines.append, hang_s=2.0)
    await supervisor.start([child])
    pid = supervisor.pids["turning"]
    watching = asyncio.create_task(supervisor.watch())
    try:
        # When it does not run any more, though it lives
        os.kill(pid, signal.SIGSTOP)
        # Then another takes its place
        await until(lambda: supervisor.pids["turning"] != pid and "turning is back" in lines, 30)
        assert not alive(pid)
        assert any("turning has stood still for 2 s and is killed" in line for line in lines)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.stop([])
