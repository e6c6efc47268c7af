"""OP-26 and OP-27: requests at once. A place comes back however a request ends, and counts over all gateways."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli import keys
from shared.contracts import admin_messages as am
from shared.contracts.ids import TenantId
from shared.lifecycle.ready import READY_VARIABLE
from tests.conformance.test_op_cancellation import LIMIT_S, SLOTS, asked_at, body, client_of, idle, running_at, stream
from tests.stack.running import OTHER_KEY, Baton, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
TIMES, LIMIT, BURST = 20, 4, 60
BURST_TOKENS = 500


class Keyed:
    """A tenant of the test's own with one key."""

    def __init__(self, stack: Baton, tenant: str, *limits: str) -> None:
        self.stack, self.tenant = stack, tenant
        done = stack.run("keys", "create", tenant, "--id", "only", "--json", *limits)
        assert done.returncode == 0, done.stderr
        self.key: str = json.loads(done.stdout)["api_key"]

    def running(self) -> int:
        """As `./baton keys list` shows it."""
        (found,) = keys.asked(self.stack.env, am.TenantsQuery(tenant=TenantId(self.tenant))).tenants
        (key,) = found.keys
        assert key.running == found.running
        return key.running

    async def runs(self, count: int) -> None:
        await asyncio.to_thread(until, lambda: self.running() == count, LIMIT_S)


def left(answer: httpx.Response) -> int:
    """Places left, by the header; no answer may tell of fewer than none."""
    count = int(answer.headers["x-ratelimit-remaining-parallel"])
    assert 0 <= count <= int(answer.headers["x-ratelimit-limit-parallel"])
    return count


async def three_chunks(client: httpx.AsyncClient, asked: dict[str, Any]) -> bool:
    """Start a stream, read three chunks and go; False when there is no place yet."""
    async with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        left(answer)
        if answer.status_code == 429:
            return False
        chunks = 0
        async for line in answer.aiter_lines():
            chunks += line.startswith("data: {")
            if chunks == 3:
                break
    return True


@asynccontextmanager
async def bystander(stack: Baton, tokens: int) -> AsyncIterator[None]:
    """A long stream of the other tenant, running before and unharmed after."""
    async with client_of(stack, OTHER_KEY) as other:
        before = running_at(stack)
        running = asyncio.create_task(stream(other, body(tokens, 1)))
        await asyncio.to_thread(until, lambda: running_at(stack) > before, LIMIT_S)
        try:
            yield
        except BaseException:
            running.cancel()
            raise
        assert await running == "length"


@asynccontextmanager
async def busy(stack: Baton) -> AsyncIterator[None]:
    """Every place of the worker is taken by the other tenant."""
    async with client_of(stack, OTHER_KEY) as other:
        fillers = [asyncio.create_task(stream(other, body(6000, 100 + number))) for number in range(SLOTS)]
        try:
            await asyncio.to_thread(until, lambda: running_at(stack) >= SLOTS, LIMIT_S)
            yield
        finally:
            for filler in fillers:
                filler.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)


async def left_at_once(keyed: Keyed, first: int, prompt_tokens: int) -> None:
    """Start a request and go before anything has come of it, once it has its place."""
    for number in range(TIMES):
        while True:
            asked = body(4000, first + number, prompt_tokens, stream=True)
            writer, reader = await asked_at(keyed.stack, keyed.key, asked)
            answer = asyncio.create_task(reader.read(12))
            while not answer.done() and not (placed := await asyncio.to_thread(keyed.running)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.transport.abort()
            answer.cancel()
            if placed:
                break


async def test_op26_a_place_comes_back_wherever_its_request_is_left(fake_stack: Baton) -> None:
    keyed = Keyed(fake_stack, "op26", "--parallel", "1")
    async with client_of(fake_stack, keyed.key) as client, bystander(fake_stack, 800):
        for number in range(TIMES):
            async with asyncio.timeout(LIMIT_S):
                while not await three_chunks(client, body(4000, 500 + number)):
                    pass
        await served_again(client)
        await left_at_once(keyed, 600, prompt_tokens=4000)  # in prefill
        await served_again(client)
        async with busy(fake_stack):
            await left_at_once(keyed, 700, prompt_tokens=20)  # in the queue
        await served_again(client)
        await keyed.runs(0)
    await idle(fake_stack)
    await keyed.runs(0)


async def served_again(client: httpx.AsyncClient) -> None:
    """A normal request has its place at once, or when it is told to come back."""
    for _ in range(3):
        normal = await client.post("/v1/completions", json=body(4, 900))
        if normal.status_code != 429:
            break
        await asyncio.sleep(int(normal.headers["retry-after"]))
    assert normal.status_code == 200
    left(normal)


@contextmanager
def more_gateways(stack: Baton, folder: Path, count: int) -> Iterator[None]:
    """Further gateway processes on the port of the stack's own: what it was told, they are told."""
    own = stack.pid("gateway")
    told = (Path("/proc") / str(own) / "environ").read_bytes().decode().split("\0")
    env = dict(line.split("=", 1) for line in told if "=" in line)
    ready = [folder / f"ready-{number}" for number in range(count)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "services.gateway"],
            cwd=os.readlink(f"/proc/{own}/cwd"),
            env=env | {READY_VARIABLE: str(path), "BATON_GATEWAY_PORT": stack.url.rpartition(":")[2]},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for path in ready
    ]
    try:
        until(lambda: all(path.exists() for path in ready), LIMIT_S)
        seen: set[str] = set()

        def all_answer() -> bool:
            seen.add(stack.get("/baton/cluster")["gateway"]["id"])
            return len(seen) > count

        until(all_answer, LIMIT_S)
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


async def test_op27_the_limit_holds_over_three_gateways(fake_stack: Baton, tmp_path: Path) -> None:
    keyed = Keyed(fake_stack, "op27")
    done = fake_stack.run("keys", "limits", "op27", "--parallel", str(LIMIT))
    assert done.returncode == 0, done.stderr
    with more_gateways(fake_stack, tmp_path, 2):
        async with bystander(fake_stack, 600), client_of(fake_stack, keyed.key) as client:
            asks = [client.post("/v1/completions", json=body(BURST_TOKENS, 2000 + n)) for n in range(BURST)]
            answers = await asyncio.gather(*asks)
            refused = [answer for answer in answers if answer.status_code != 200]
            for answer in refused:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (429, "concurrency_limit_exceeded")
                assert f"limit of {LIMIT} requests at once" in error["message"]
                assert int(answer.headers["retry-after"]) >= 1
            assert min(left(answer) for answer in answers) == 0
            served = [answer.json()["id"] for answer in answers if answer.status_code == 200]
            assert len(served) >= LIMIT
            assert refused
            assert await asyncio.to_thread(most_at_once, fake_stack, served) <= LIMIT
            # free are exactly four
            await keyed.runs(0)
            held = [asyncio.create_task(stream(client, body(6000, 3000 + number))) for number in range(LIMIT)]
            await keyed.runs(LIMIT)
            assert (await client.post("/v1/completions", json=body(4, 900))).status_code == 429
            await keyed.runs(LIMIT)
            for one in held:
                one.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await keyed.runs(0)
    await idle(fake_stack)


def most_at_once(stack: Baton, answer_ids: list[str]) -> int:
    """The most of these requests that the worker had at the same time, by its own spans."""
    changes: list[tuple[int, int]] = []
    for answer_id in answer_ids:
        spans = stack.trace(answer_id, "decode.run", "gateway.request")
        (run,) = [span for span in spans if span["name"] == "decode.run"]
        changes += [(run["start_ns"], 1), (run["end_ns"], -1)]
    return max(itertools.accumulate(change for _, change in sorted(changes)))
