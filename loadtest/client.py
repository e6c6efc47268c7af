"""Sends a load to a gateway and measures as a client does: every request streamed, sent at its time come what may."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.workload import Job

REQUEST_LIMIT_S = 120.0


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request. Seconds count from when it was sent."""

    number: int
    id: str = ""
    sent_s: float = 0.0  # since the start of the load
    first_s: float | None = None  # to the first piece of text
    gaps_s: list[float] = field(default_factory=list)  # between pieces, which are a token or several each
    total_s: float = 0.0
    tokens: int = 0
    text_digest: str = ""
    error: str = ""  # empty: it ended as it should


async def run_load(url: str, key: str, model: str, jobs: Sequence[Job]) -> tuple[list[Outcome], float]:
    """Send every job at its time, open loop. Returns outcomes in order, and seconds from first arrival to last end."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=REQUEST_LIMIT_S, limits=limits) as client:
        started = time.monotonic()
        outcomes = await asyncio.gather(*(_at_its_time(client, model, job, started) for job in jobs))
        return list(outcomes), time.monotonic() - started


async def _at_its_time(client: httpx.AsyncClient, model: str, job: Job, started: float) -> Outcome:
    await asyncio.sleep(max(0.0, started + job.at_s - time.monotonic()))
    sent = time.monotonic()
    outcome = Outcome(job.number, sent_s=sent - started)
    try:
        await _stream(client, model, job, outcome, sent)
    except (httpx.HTTPError, ValueError, KeyError) as exc:
        outcome.error = f"{type(exc).__name__}: {exc}"
    outcome.total_s = time.monotonic() - sent
    return outcome


async def _stream(client: httpx.AsyncClient, model: str, job: Job, outcome: Outcome, sent: float) -> None:
    body = {"model": model, "prompt": list(job.prompt), "max_tokens": job.max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    text, finish, done, last = hashlib.sha256(), "", False, sent
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            outcome.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                outcome.error = str(event["error"])[:200]
                return
            piece, reason = _piece(event)
            outcome.id = event["id"]
            outcome.tokens = (event.get("usage") or {}).get("completion_tokens", outcome.tokens)
            finish = reason or finish
            if piece:
                now = time.monotonic()
                text.update(piece.encode())
                if outcome.first_s is None:
                    outcome.first_s = now - sent
                else:
                    outcome.gaps_s.append(now - last)
                last = now
    outcome.text_digest = text.hexdigest()
    if not (done and finish in ("stop", "length")):
        outcome.error = f"ended with done={done}, finish={finish!r}"


def _piece(event: dict[str, Any]) -> tuple[str, str]:
    """The text of an event and its finish reason."""
    choices = event.get("choices") or [{}]
    return choices[0].get("text") or "", choices[0].get("finish_reason") or ""
