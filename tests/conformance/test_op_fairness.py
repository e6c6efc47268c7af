"""OP-39 against real processes with fake workers: one tenant floods, another comes now and then, then both wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.stack.running import MODEL, OTHER_KEY, Baton, tenants_file

pytestmark = pytest.mark.timeout(300)

FLOOD, GIANT_EVERY = 500, 10
SMALL_TOKENS, GIANT_TIMES = 4, 50
PLACES = 4
SMALLS, BACKLOG, WINDOW = 4, 400, 300
"""What ends in the window is more than the shares may differ by: who starves is seen."""
MANY = 50
LIMIT_S = 120.0


@dataclass
class Client:
    """Completions over sockets of their own: a pool of hundreds would be slower than what it asks. Keeps what ended."""

    url: str
    ended: list[tuple[str, int]] = field(default_factory=list)  # (key, tokens), in the order of their ends

    async def ask(self, key: str, max_tokens: int) -> None:
        """A stream of exactly `max_tokens`, read to its end."""
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        content = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        place = urlsplit(self.url)
        tokens = 0
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + content)
            status = await reader.readline()
            assert b" 200 " in status, status + await reader.read()
            async for line in reader:
                if line.startswith(b"data: {"):
                    usage = json.loads(line.removeprefix(b"data: ")).get("usage")
                    tokens = usage["total_tokens"] if usage else tokens
        finally:
            writer.close()
        assert tokens > max_tokens
        self.ended.append((key, tokens))


@pytest.fixture
def flooded(tmp_path: Path, default_model_dir: Path) -> Iterator[Baton]:
    """Fake workers with few places, so that a queue forms at once; nobody is refused for the length of the wait."""
    baton = Baton(tmp_path / "state")
    others = tenants_file(tmp_path / "tenants.json", [("other", OTHER_KEY)])
    settings = (f"policy.tenants={others}", f"engine.max_sequences={PLACES}", "scheduler.slo_ttft_s=3600")
    try:
        baton.up("--fake", *(flag for setting in settings for flag in ("--set", setting)))
        yield baton
        baton.down()
    finally:
        baton.kill_all()


async def test_op39_one_tenant_floods(flooded: Baton) -> None:
    """500 requests of A, every tenth of 50 times the tokens; then B's small ones, one a second: four of them, which is
    enough to see a wait that grows with A's backlog. In the end B has a backlog too, and both wait."""
    assert flooded.record is not None
    key_a, key_b = flooded.record.api_key, OTHER_KEY
    client = Client(flooded.url)
    flood = [
        asyncio.create_task(client.ask(key_a, SMALL_TOKENS * (1 if i % GIANT_EVERY else GIANT_TIMES)))
        for i in range(FLOOD)
    ]
    # When A's backlog is there, B's small ones come
    await wait_for(flooded, "demo", FLOOD // 3)
    for _ in range(SMALLS):
        next_one = asyncio.create_task(asyncio.sleep(1.0))
        # Then each waits for requests that run, not for those that wait: many that came before it are still there
        await client.ask(key_b, SMALL_TOKENS)
        assert left(flood) > MANY
        await next_one
    # And while both wait they get about equal shares of the tokens, but for giants that ran at the beginning, whose
    # length nobody knew, and one at the end
    own = [asyncio.create_task(client.ask(key_b, SMALL_TOKENS)) for _ in range(BACKLOG)]
    await wait_for(flooded, "other", BACKLOG // 4)
    before, rest = len(client.ended), left(own)
    async with asyncio.timeout(LIMIT_S):
        while left(own) > rest - WINDOW:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    got = {key: sum(tokens for one, tokens in client.ended[before:] if one == key) for key in (key_a, key_b)}
    assert left(flood) > MANY
    assert got[key_b] > (PLACES + 1) * SMALL_TOKENS * GIANT_TIMES, got
    assert abs(got[key_a] - got[key_b]) <= (PLACES + 1) * SMALL_TOKENS * GIANT_TIMES, got
    for task in (*own, *flood):
        task.cancel()
    await asyncio.gather(*own, *flood, return_exceptions=True)


def left(tasks: list[asyncio.Task[None]]) -> int:
    """How many are not done. Raises what one of them raised."""
    for task in tasks:
        if task.done():
            task.result()
    return sum(not task.done() for task in tasks)


async def wait_for(baton: Baton, tenant: str, count: int) -> None:
    """Returns when so many requests of the tenant wait for a place, by the scheduler's newest beat."""
    assert baton.record is not None
    headers = {"Authorization": f"Bearer {baton.record.admin_key}"}
    async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(base_url=baton.url, timeout=LIMIT_S) as http:
        while True:
            scheduler = (await http.get("/baton/cluster", headers=headers)).json()["scheduler"]
            waiting = {load["tenant"]: load["waiting"] for load in scheduler["tenants"]} if scheduler else {}
            if waiting.get(tenant, 0) >= count:
                return
            await asyncio.sleep(0.1)
