"""Batches on a running stack: asked for as the gateway asks, so that its own death is no hindrance; and the ledger."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis

from services.cli.state import StateFolder
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import connect_bus
from shared.contracts import batch_messages as b
from shared.contracts import subjects
from shared.contracts.errors import Unavailable
from shared.contracts.ids import BatchId, FileId, TenantId
from tests.stack.running import MODEL, Baton

DEMO = TenantId("demo")
ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
ASK_S, ASK_TRIES, PAUSE_S = 5.0, 60, 0.25


def batch_line(custom_id: str, max_tokens: int, prompt: Sequence[int] = tuple(range(1000, 1020))) -> bytes:
    """One line. The prompt is token ids, so that their number is known."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens}
    line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(line).encode() + b"\n"


class Batches:
    """The batches of the tenant `demo`. What is not answered while something is away is asked again."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def begin(self, lines: Sequence[bytes]) -> BatchId:
        """Upload the lines and create a batch over them."""
        opened = await self._files(b.FileOpen(tenant=DEMO, filename="lines.jsonl", purpose="batch"))
        await self._files(b.FileAppend(tenant=DEMO, file_id=opened.file_id, number=0, data=b"".join(lines)))
        await self._files(b.FileClose(tenant=DEMO, file_id=opened.file_id))
        ask = b.BatchCreate(tenant=DEMO, input_file_id=opened.file_id, endpoint=ENDPOINT, completion_window="24h")
        found: b.BatchInfo = await self._jobs(ask)
        return found.batch_id

    async def now(self, batch_id: BatchId) -> b.BatchInfo:
        found: b.BatchInfo = await self._jobs(b.BatchGet(tenant=DEMO, batch_id=batch_id))
        return found

    async def reach(self, batch_id: BatchId, count: int, timeout_s: float = 60.0) -> b.BatchInfo:
        """The batch once so many lines have a result."""
        async with asyncio.timeout(timeout_s):
            while (found := await self.now(batch_id)).completed + found.failed < count:
                assert found.status not in ENDED, found
                await asyncio.sleep(PAUSE_S)
        return found

    async def end(self, batch_id: BatchId, timeout_s: float = 120.0) -> b.BatchInfo:
        """The batch once it has ended."""
        async with asyncio.timeout(timeout_s):
            while (found := await self.now(batch_id)).status not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
        return found

    async def cancel(self, batch_id: BatchId) -> None:
        await self._jobs(b.BatchCancel(tenant=DEMO, batch_id=batch_id))

    async def file(self, file_id: FileId) -> list[dict[str, Any]]:
        """The lines of a file; none when there is no file."""
        if not file_id:
            return []
        data = b""
        while True:
            got: b.FileBytes = await self._files(b.FileRead(tenant=DEMO, file_id=file_id, offset=len(data)))
            data += got.data
            if len(data) == got.num_bytes:
                return [json.loads(line) for line in data.splitlines()]

    async def _files(self, ask: Any) -> Any:
        return await self._asked(subjects.BATCH_FILES, ask, b.FileReply)

    async def _jobs(self, ask: Any) -> Any:
        return await self._asked(subjects.BATCH_JOBS, ask, b.BatchReply)

    async def _asked(self, subject: str, ask: Any, reply: Any) -> Any:
        for _ in range(ASK_TRIES):
            try:
                return await self._bus.request(subject, ask, reply, timeout_s=ASK_S)
            except Unavailable:
                await asyncio.sleep(PAUSE_S)
        return await self._bus.request(subject, ask, reply, timeout_s=ASK_S)


@asynccontextmanager
async def batches_of(stack: Baton) -> AsyncIterator[Batches]:
    """Connect to the stack's NATS as its gateway does."""
    url = _told_to_policy(stack, r"nats://[0-9.:]+")
    password = (StateFolder(stack.folder).secrets / "nats-gateway").read_text().strip()
    async with connect_bus(url, "gateway", password=password) as bus:
        yield Batches(bus)


class Ledger:
    """policy's own sums of the tenant `demo`, read in Redis."""

    def __init__(self, stack: Baton) -> None:
        self._redis = stack_redis(stack)
        self._before = (0, 0, 0)
        self._before = self.billed()

    def billed(self) -> tuple[int, int, int]:
        """Requests, prompt and completion tokens billed since this object was made."""
        usage: Any = self._redis.hgetall(f"baton:policy:{{{DEMO}}}:usage")
        found = (int(usage.get(name, 0)) for name in ("requests", "prompt_tokens", "completion_tokens"))
        requests, prompt, completion = (now - before for now, before in zip(found, self._before, strict=True))
        return requests, prompt, completion

    async def settles_at(self, tokens: tuple[int, int], timeout_s: float = 45.0) -> None:
        """The sums reach these prompt and completion tokens, and stay there."""
        async with asyncio.timeout(timeout_s):
            while self.billed()[1:] != tokens:  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(2.0)
        assert self.billed()[1:] == tokens


def stack_redis(stack: Baton) -> redis.Redis:
    """A client of the stack's own Redis."""
    url = _told_to_policy(stack, r"redis://[0-9.:]+/\d+")
    password = (StateFolder(stack.folder).secrets / "redis").read_text().strip()
    return redis.Redis.from_url(url, password=password, decode_responses=True)


def tokens_in(lines: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Prompt and completion tokens that the lines of an output file show."""
    usages = [line["response"]["body"]["usage"] for line in lines]
    return sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages)


def _told_to_policy(stack: Baton, pattern: str) -> str:
    found = re.search(pattern, Path(f"/proc/{stack.pid('policy')}/environ").read_text())
    assert found is not None
    return found.group(0)
