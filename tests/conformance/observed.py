"""A stack of fake workers that is watched from outside: by a trace collector, on NATS, and at every `/metrics`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import nats
from nats.aio.msg import Msg

from shared.telemetry.metric import Metric
from tests.collector import Collector, attributes, collector
from tests.servers import NatsServer
from tests.stack.running import MODEL, Baton, until

ALPHA, BETA = "sk-keymarker-alpha-tailmarker", "sk-keymarker-beta-tailmarker"
HASTY, THRIFTY = "sk-keymarker-hasty-tailmarker", "sk-keymarker-thrifty-tailmarker"
TENANTS: list[dict[str, Any]] = [
    {"id": "alpha-tenant", "key": ALPHA},
    {"id": "beta-tenant", "key": BETA},
    {"id": "hasty-tenant", "key": HASTY, "klass": "analysis"},
    {"id": "thrifty-tenant", "key": THRIFTY, "limits": {"requests_per_minute": 1}},
]
SETTINGS = {
    "log.format": "json",
    "log.level": "debug",
    "engine.max_sequences": "4",
    "engine.token_budget": "64",
    "engine.prefill_token_budget": "64",
    "kv.block_size": "16",
    "kv.pool_bytes": str(128 * 64),  # 128 blocks, 2,048 tokens of a fake's 4 bytes each
    "policy.analysis_budget_s": "1",
    # who listens to every subject answers for the dead too: that a worker is gone shows by its silence alone
    "scheduler.worker_timeout_s": "4",
}
BYSTANDER_TOKENS = 400
EVERY_REQUEST = {"gateway", "policy", "scheduler", "prefix-cache-index", "decode"}
"""Services that a request which was served went through, whatever its path."""


@dataclass
class Observed:
    """The stack and what was seen of it."""

    baton: Baton
    traces: Collector
    messages: list[bytes] = field(default_factory=list, repr=False)
    """Subject, headers and data of everything that went over NATS."""

    # ------------------------------------------------------------------------------------------ clients

    def client(self, key: str = ALPHA, **headers: str) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=64)
        headers = {"Authorization": f"Bearer {key}", **headers}
        return httpx.AsyncClient(base_url=self.baton.url, headers=headers, timeout=120, limits=limits)

    async def canary(self) -> None:
        """Greedy, 4 tokens, must be served."""
        async with self.client(BETA) as client:
            answer = await client.post("/v1/completions", json=body("canary", 4))
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4

    # ------------------------------------------------------------------------------------------ metrics

    def scrape(self) -> dict[str, str]:
        """The text of every process."""
        shown = json.loads(self.baton.run("status", "--json").stdout)["metrics"]
        return {name: httpx.get(url, timeout=10).text for name, url in shown.items()}

    def sample(self, process: str, metric: Metric, suffix: str = "", **labels: str) -> float:
        """The sum of a metric's series that have these labels; `suffix` is `_count` or `_sum` of a histogram."""
        return sample(self.scrape()[process], metric.exposed + suffix, **labels)

    # ------------------------------------------------------------------------------------------ spans

    def spans(self) -> list[dict[str, Any]]:
        """Every span the collector has, as plain values."""
        return [plain(service, span) for service, span in self.traces.spans]

    def trace_of(self, **wanted: Any) -> list[dict[str, Any]]:
        """The spans of the one trace whose root has these attributes, once it is whole; see `is_whole`."""

        def whole() -> list[dict[str, Any]]:
            spans = self.spans()
            roots = [s for s in spans if s["name"] == "gateway.request" and wanted.items() <= s["attributes"].items()]
            assert len(roots) <= 1, roots
            seen[:] = [s for s in spans if roots and s["trace_id"] == roots[0]["trace_id"]]
            return seen if is_whole(seen) else []

        seen: list[dict[str, Any]] = []
        return until(whole, 60, lambda: f"a whole trace with {wanted}, now {sorted(s['name'] for s in seen)}")


def is_whole(spans: list[dict[str, Any]]) -> bool:
    """Whether the ledger's span, every parent, and a span of every service the request went through are there.

    Services send their spans apart from one another, each up to seconds after they ended.
    """
    known = {span["span_id"] for span in spans}
    services = {span["service"] for span in spans}
    places = [span for span in spans if span["name"] == "scheduler.place"]
    last = max(places, key=lambda span: span["end_ns"])["attributes"] if places else {}
    served = any(span["attributes"].get("baton.status") == "ok" for span in spans if span["name"] == "gateway.request")
    passed = {"policy"} | (EVERY_REQUEST if served else set())
    passed |= {"prefill"} if last.get("baton.path") == "handed_off" else set()
    return (
        any(span["name"] == "policy.settle" for span in spans)
        and all(not span["parent_id"] or span["parent_id"] in known for span in spans)
        and passed <= services
    )


def body(prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 3, **more}


@dataclass
class Read:
    """What a client saw of a stream. `ttft_s` from the moment it asked."""

    text: str = ""
    finish: str = ""
    id: str = ""
    pieces: int = 0
    ttft_s: float = 0.0
    error: dict[str, Any] | None = None


async def read(client: httpx.AsyncClient, asked: dict[str, Any], leave_after: int = 0) -> Read:
    """Stream a completion to its end, or leave after so many pieces of text."""
    found, started = Read(), time.monotonic()
    async with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        if answer.status_code != 200:
            found.error = json.loads(await answer.aread())["error"]
            return found
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                found.error = chunk["error"]
                break
            found.id = chunk["id"]
            for choice in chunk["choices"]:
                if choice["text"]:
                    found.ttft_s = found.ttft_s or time.monotonic() - started
                    found.text += choice["text"]
                    found.pieces += 1
                found.finish = choice["finish_reason"] or found.finish
            if leave_after and found.pieces >= leave_after:
                break
    return found


class Bystander:
    """A long stream of the other tenant that runs already, and must end unharmed."""

    def __init__(self, stack: Observed) -> None:
        self._stack = stack
        self._flows = asyncio.Event()
        self._task: asyncio.Task[Read]

    async def __aenter__(self) -> Bystander:
        self._task = asyncio.create_task(self._run())
        await eventually(lambda: self._stack.baton.get("/baton/cluster")["gateway"]["requests"] > 0)
        return self

    async def _run(self) -> Read:
        async with self._stack.client(BETA) as client:
            return await read(client, body("a bystander", BYSTANDER_TOKENS))

    async def __aexit__(self, *error: object) -> None:
        found = await self._task
        if error[0] is None:
            assert (found.finish, found.error) == ("length", None)


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll beside the running streams."""
    await asyncio.to_thread(until, condition, timeout_s)


def plain(service: str, span: Any) -> dict[str, Any]:
    return {
        "service": service,
        "name": span.name,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "status": span.status.code,
        "attributes": attributes(span),
        "links": [link.trace_id.hex() for link in span.links],
    }


def sample(text: str, name: str, **labels: str) -> float:
    """The sum of the series `name` in an exposition that have these labels."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(re.escape(name) + r"(?:\{(.*)\})? (\S+)", line)
        if found and all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
            total += float(found[2])
    return total


@contextmanager
def listening(url: str, messages: list[bytes]) -> Iterator[None]:
    """Keep everything that goes over a NATS server without users."""
    ready, stop = threading.Event(), asyncio.Event()

    async def listen() -> None:
        async def take(msg: Msg) -> None:
            messages.append(b"\n".join((msg.subject.encode(), repr(msg.headers).encode(), msg.data)))

        client = await nats.connect(url)
        await client.subscribe(">", cb=take, pending_bytes_limit=-1, pending_msgs_limit=-1)
        await client.flush()
        ready.set()
        await stop.wait()
        await client.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(listen()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@contextmanager
def observed_stack(folder: Path, server: NatsServer) -> Iterator[Observed]:
    """Start it with all watchers; at the end nothing of it may be left."""
    tenants = []
    for tenant in TENANTS:
        key = {"id": "first", "hash": hashlib.sha256(tenant["key"].encode()).hexdigest()}
        tenants.append({**{k: v for k, v in tenant.items() if k != "key"}, "keys": [key]})
    path = folder / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}))
    path.chmod(0o600)
    baton = Baton(folder / "state")
    with collector() as traces:
        stack = Observed(baton, traces)
        chosen = SETTINGS | {
            "policy.tenants": str(path),
            "bus.nats_url": server.url,
            "telemetry.otlp_endpoint": traces.url,
        }
        with listening(server.url, stack.messages):
            try:
                baton.up("--fake", *(part for name, value in chosen.items() for part in ("--set", f"{name}={value}")))
                yield stack
                left = baton.traces_outside()
                baton.down()
                baton.nothing_left(left)
            finally:
                baton.kill_all()
