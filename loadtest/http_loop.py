"""The closed loop over HTTP: the same requests to any server that streams OpenAI completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.closed_loop import Arrivals, Job, LoopResult
from loadtest.http_stream import post
from shared.contracts.errors import Unavailable

REQUEST_LIMIT_S = 600.0


def run_http(
    url: str,
    jobs: Sequence[Job],
    concurrency: int,
    model: str,
    more: Mapping[str, Any],
    key: str = "",
    whole: bool = True,
) -> LoopResult:
    """Run all jobs, `concurrency` at once, each streamed.

    Args:
        more: fields that only this server knows, such as `ignore_eos`. Where `stream_options` ask for the usage in
            every chunk, a chunk counts as so many tokens as it says; otherwise as one, and the rest in the end.
        whole: answers are as long as asked; otherwise they may end by themselves.

    Raises:
        Unavailable: the server refused or failed.
        ValueError: an answer had another number of tokens than asked, and should be whole.
    """
    arrivals = Arrivals(jobs, concurrency, time.perf_counter(), whole)
    return asyncio.run(_run(url, arrivals, {"model": model, **more}, key))


async def _run(url: str, arrivals: Arrivals, common: Mapping[str, Any], key: str) -> LoopResult:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    waiting = iter(enumerate(arrivals.jobs))
    arrivals.start = time.perf_counter()

    async def one_after_another() -> None:
        for number, job in waiting:
            await _stream(f"{url}/v1/completions", headers, number, job, common, arrivals)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(arrivals.concurrency, len(arrivals.jobs))):
                group.create_task(one_after_another())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return arrivals.close(time.perf_counter())


async def _stream(
    url: str, headers: Mapping[str, str], number: int, job: Job, common: Mapping[str, Any], arrivals: Arrivals
) -> None:
    body = {"prompt": list(job.prompt), "max_tokens": job.max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | dict(common)
    seen, total = 0, None  # tokens

    def hear(line: str) -> None:
        nonlocal seen, total
        text, told = read_event(line)
        total = told if told is not None else total
        if text and (new := min(job.max_tokens, seen + 1 if told is None else told) - seen) > 0:
            seen += new
            arrivals.came(number, new, time.perf_counter())

    arrivals.submitted(number, time.perf_counter())
    await post(url, headers, json.dumps(body).encode(), hear, REQUEST_LIMIT_S)
    if total is None:
        raise Unavailable(f"{url}: an answer ended without its usage")
    # those without text of their own, such as half a character, and those that came together and were not told apart
    if seen < total:
        arrivals.came(number, total - seen, time.perf_counter())
    arrivals.ended(number)


def read_event(line: str) -> tuple[str, int | None]:
    """The text of a line of the stream, and the output tokens where it tells them. Raises Unavailable for an error."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return "", None
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise Unavailable(str(event["error"])[:300])
    choices, usage = event.get("choices") or [{}], event.get("usage") or {}
    return choices[0].get("text") or "", usage.get("completion_tokens")
