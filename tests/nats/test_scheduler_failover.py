"""Two scheduler processes on a real NATS server: a killed leader is replaced by the standby, in a higher term."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shared.bus.nats_connection import connect_bus
from shared.contracts import messages as m
from shared.contracts import subjects
from tests.servers import NatsServer

ROOT = Path(__file__).resolve().parents[2]


def start(url: str, ready: Path) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "NATS_URL": url,
        "BATON_READY_FILE": str(ready),
        "BATON_SCHEDULER_LEASE_S": "1",
        "BATON_SCHEDULER_BEAT_S": "0.2",
    }
    return subprocess.Popen([sys.executable, "-m", "services.scheduler"], cwd=ROOT, env=env)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)


async def test_a_killed_leader_is_replaced_in_a_higher_term(own_nats_server: NatsServer, tmp_path: Path) -> None:
    beats: list[m.SchedulerBeat] = []
    processes: list[subprocess.Popen[bytes]] = []
    async with connect_bus(own_nats_server.url, "test") as bus:
        await bus.subscribe(subjects.sched_beat("default"), m.SchedulerBeat, lambda d: beats.append(d.message))
        try:
            processes.append(start(own_nats_server.url, tmp_path / "first"))
            await until(lambda: bool(beats))
            processes.append(start(own_nats_server.url, tmp_path / "second"))
            await until((tmp_path / "second").exists)
            leader = beats[-1]
            processes[0].kill()
            await until(lambda: beats[-1].scheduler_id != leader.scheduler_id)
            assert beats[-1].term > leader.term
            processes[1].send_signal(signal.SIGTERM)
            assert processes[1].wait(10) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait(10)
