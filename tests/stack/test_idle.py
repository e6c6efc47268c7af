"""What a stack costs: while nobody asks anything, and after ten thousand requests."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.stack.running import MODEL, Baton

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

IDLE_SHARE = 0.15
"""Of one core. An idle machine is held to 0.05 (docs/results/idle.txt); here others may compute, which costs too."""
REQUESTS = 10_000
WARM = 2_000
POOL_BYTES = 2**16
"""So small that the first requests fill it: blocks, their tags and the index hold as much as they ever will."""
GROWTH_BYTES = 8 * 2**20
"""Of one process over the last 8,000 requests: 1 KB a request kept for ever would be as much."""


def memory_bytes(pid: int, field: str) -> int:
    """A field of a process's memory: Rss counts shared pages in full, Pss by the number of those who share."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


def memory(stack: Baton, field: str) -> dict[str, int]:
    """Bytes by process, named by the end of its command line and its id."""
    found = {}
    for pid, line in stack.processes().items():
        with suppress(OSError):
            found[f"{line.split()[-1].rpartition('/')[2]} {pid}"] = memory_bytes(pid, field)
    return found


@pytest.mark.parametrize("seconds", [8.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_an_idle_stack_sleeps(stack: Baton, seconds: float) -> None:
    stack.wait_idle()
    before, started = stack.cpu_s(), time.monotonic()
    time.sleep(seconds)
    share = (stack.cpu_s() - before) / (time.monotonic() - started)
    print(f"\nidle: {share:.1%} of one core")
    for field in ("Rss", "Pss"):
        found = memory(stack, field)
        print(f"{field}: {sum(found.values()) / 2**20:.0f} MiB in {len(found)} processes")
        for name, size in sorted(found.items(), key=lambda entry: -entry[1]):
            print(f"  {size / 2**20:8.0f} MiB  {name}")
    assert share < IDLE_SHARE


@pytest.mark.long
def test_ten_thousand_requests_leave_nothing_behind(own: Baton, default_model_dir: Path) -> None:
    # Given a stack of fake workers that has warmed up: pools, caches and rings are as full as they get
    own.up("--fake", "--set", f"kv.pool_bytes={POOL_BYTES}")
    assert max(sum(worker["total_blocks"]) for worker in own.get("/baton/cluster")["workers"]) < WARM
    client = own.openai()

    def ask(number: int) -> None:
        prompt = f"{number} bottles of " + "beer " * (number % 50)
        stream = bool(number % 2)
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1 + number % 8, stream=stream)
        if stream:
            for _ in answer:
                pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(WARM)))
        own.wait_idle()
        before = memory(own, "Anonymous")
        # When thousands more come
        list(pool.map(ask, range(WARM, REQUESTS)))
    own.wait_idle()
    # Then no process has grown
    growth = {name: size - before[name] for name, size in memory(own, "Anonymous").items()}
    print("\n" + "\n".join(f"{size / 2**20:+8.2f} MiB  {name}" for name, size in growth.items()))
    assert max(growth.values()) < GROWTH_BYTES, growth
    own.down()
