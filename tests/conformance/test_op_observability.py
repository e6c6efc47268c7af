"""Cases of reference reports on traces and metrics, against a running stack of fake workers.

What a fake computes means nothing here; that everything is named, counted and kept silent about does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.telemetry import metric_names as names
from shared.telemetry.metric import Metric
from tests.conformance.observed import (
    ALPHA,
    BETA,
    HASTY,
    TENANTS,
    THRIFTY,
    Bystander,
    Observed,
    Read,
    body,
    eventually,
    observed_stack,
    read,
    sample,
)
from tests.servers import start_nats
from tests.stack.running import MODEL
from tests.stack.streams import kill, recovered

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PARENTS = {
    "gateway.tokenize": "gateway.request",
    "gateway.stream": "gateway.request",
    "policy.admit": "gateway.request",
    "policy.settle": "gateway.request",
    "scheduler.submit": "gateway.request",
    "scheduler.place": "gateway.request",
    "index.match": "scheduler.place",
    "decode.reserve": "scheduler.place",
    "decode.run": "scheduler.place",
    "prefill.run": "scheduler.place",
    "handoff.pull": "scheduler.place",
}
SERVICES = {"gateway", "policy", "scheduler", "prefix-cache-index", "prefill", "decode"}
MARKER, MAIL = "Quetzalcoatlus", "marker.user@example.org"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    server = start_nats(folder / "nats")
    try:
        with observed_stack(folder, server) as found:
            yield found
    finally:
        server.kill()


def unlike(number: int, tokens: int) -> list[int]:
    """A prompt that shares no block with those of other numbers."""
    rng = random.Random(number)
    return [1000 + rng.randrange(8000) for _ in range(tokens)]


# ---------------------------------------------------------------------------------------------- OP-62


async def test_op62_context_over_the_queue_and_between_requests(stack: Observed) -> None:
    # Given 50 requests at once, every other one with a client's trace of its own
    clients = {number: f"{0xC0FFEE000 + number:032x}" for number in range(0, 50, 2)}

    async def one(client: httpx.AsyncClient, number: int) -> str:
        headers = {"traceparent": f"00-{clients[number]}-{number + 1:016x}-01"} if number in clients else {}
        answer = await client.post("/v1/completions", json=body(unlike(number, 90), 3), headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"]).replace("cmpl-", "req-")

    async with Bystander(stack), stack.client() as client:
        ids = await asyncio.gather(*(one(client, number) for number in range(50)))
    # Then each has one trace, whose spans are its own and hang together
    traces = [stack.trace_of(**{"baton.request_id": request}) for request in ids]
    owners = Counter(span["span_id"] for spans in traces for span in spans)
    assert set(owners.values()) == {1}
    assert len({spans[0]["trace_id"] for spans in traces}) == 50
    handed_off = 0
    for number, spans in enumerate(traces):
        by_id = {span["span_id"]: span for span in spans}
        (root,) = [span for span in spans if not span["parent_id"]]
        assert root["name"] == "gateway.request"
        for span in spans:
            assert not span["parent_id"] or by_id[span["parent_id"]]["name"] == PARENTS[span["name"]], span
        found = {span["service"] for span in spans}
        assert found >= SERVICES - {"prefill"}
        placed = max((span for span in spans if span["name"] == "scheduler.place"), key=lambda span: span["end_ns"])
        if placed["attributes"]["baton.path"] == "handed_off":
            handed_off += 1
            assert "prefill" in found
        # tries at placing follow each other: siblings, not children
        places = sorted((s["start_ns"], s["end_ns"]) for s in spans if s["name"] == "scheduler.place")
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        # a client's trace is linked, never joined
        assert root["links"] == ([clients[number]] if number in clients else [])
    assert handed_off > 5
    assert not [span for span in stack.spans() if span["trace_id"] in clients.values()]
    await stack.canary()


# ---------------------------------------------------------------------------------------------- OP-63


@asynccontextmanager
async def full_slots(stack: Observed, count: int) -> AsyncIterator[None]:
    """So many streams of the other tenant that run; with four of them nothing else can."""
    async with stack.client(BETA) as client:
        asked = [body(unlike(700 + i, 20), 450) for i in range(count)]
        streams = [asyncio.create_task(read(client, one)) for one in asked]

        def running() -> bool:
            workers = stack.baton.get("/baton/cluster")["workers"]
            return sum(w["running"] for w in workers if w["role"] == "decode") >= count

        await eventually(running)
        yield
        for found in await asyncio.gather(*streams):
            assert found.finish == "length"


def check_ended(spans: list[dict[str, Any]], status: str, tokens: range) -> None:
    """Every span was sent once with its end, and root and stream say how it ended and how far it came."""
    assert len({span["span_id"] for span in spans}) == len(spans)
    assert all(span["end_ns"] >= span["start_ns"] > 0 for span in spans)
    root = next(span for span in spans if span["name"] == "gateway.request")
    stream = next(span for span in spans if span["name"] == "gateway.stream")
    assert root["attributes"]["baton.status"] == status
    assert root["status"] == (0 if status == "ok" else 2)
    for span in (root, stream):
        assert span["attributes"]["baton.completion_tokens"] in tokens, span


async def test_op63_span_on_early_end(stack: Observed) -> None:
    since = len(stack.baton.get("/baton/traces?limit=200")["data"])
    assert since
    async with Bystander(stack), stack.client() as client:
        # read to the end
        whole = await read(client, body(unlike(901, 30), 20))
        check_ended(stack.trace_of(**{"baton.request_id": whole.id.replace("cmpl-", "req-")}), "ok", range(20, 21))
        # left after three pieces
        left = await read(client, body(unlike(902, 30), 900), leave_after=3)
        request = {"baton.request_id": left.id.replace("cmpl-", "req-")}
        check_ended(stack.trace_of(**request), "client_gone", range(3, 900))
    # the budget runs out
    async with stack.client(HASTY) as client:
        late = await read(client, body(unlike(903, 30), 900))
    assert late.error is not None
    assert late.error["code"] == "deadline_exceeded"
    check_ended(stack.trace_of(**{"baton.tenant": "hasty-tenant"}), "deadline_exceeded", range(1, 900))
    # cancelled while it waits in the queue
    async with full_slots(stack, 4), stack.client() as client:
        asked = {**body(unlike(904, 30), 77), "stream": True}
        waiting = asyncio.create_task(client.post("/v1/completions", json=asked))
        await asyncio.sleep(0.3)
        waiting.cancel()
    spans = stack.trace_of(**{"baton.tenant": "alpha-tenant", "baton.max_tokens": 77})
    check_ended(spans, "client_gone", range(1))
    await stack.canary()
    assert not context_faults(stack)


async def test_op63_span_when_the_worker_fails(stack: Observed) -> None:
    # When every worker that takes the stream dies
    async with stack.client() as client:
        stream = asyncio.create_task(read(client, body(unlike(905, 30), 950)))
        lost: set[str] = set()
        for _ in range(3):
            await eventually(lambda: flows(stack, frozenset(lost)))
            lost.add(flows(stack, frozenset(lost)))
            await asyncio.to_thread(kill, stack.baton, stack.baton.pid("decode"))
        found = await stream
    # Then it ends with an error, and the trace says how far it came
    assert found.error is not None, found
    assert found.error["code"] == "worker_lost"
    spans = stack.trace_of(**{"baton.request_id": found.id.replace("cmpl-", "req-")})
    check_ended(spans, "worker_lost", range(1, 950))
    stream_span = next(span for span in spans if span["name"] == "gateway.stream")
    assert stream_span["attributes"]["baton.lost_workers"] == 3
    await asyncio.to_thread(recovered, stack.baton, 2)
    await stack.canary()
    assert not context_faults(stack)


def flows(stack: Observed, lost: frozenset[str] = frozenset()) -> str:
    """The decode worker that runs something now and is none of those lost; empty when there is none."""
    workers = stack.baton.get("/baton/cluster")["workers"]
    running = [w["id"] for w in workers if w["role"] == "decode" and w["running"] and w["age_s"] < 1.2]
    return next((worker for worker in running if worker not in lost), "")


def context_faults(stack: Observed) -> list[str]:
    """Log lines about spans that were left in another context than they were entered in."""
    words = ("different context", "failed to detach")
    logs = "\n".join(path.read_text(errors="replace") for path in (stack.baton.folder / "logs").glob("*.log"))
    return [line for line in logs.splitlines() if any(word in line.lower() for word in words)]


# ---------------------------------------------------------------------------------------------- OP-64


async def test_op64_secrets_and_content(stack: Observed) -> None:
    prompt = f"Tell me about {MARKER}. " * 4
    bodies: list[str] = []
    async with Bystander(stack), stack.client() as client:
        # success, and words of ours in every field that takes some
        asked = body(prompt, 5, user=MAIL, stop=[f"{MARKER}!"], metadata={"who": MAIL})
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
        chat = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 3, "user": MAIL}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        # 400s: a value, a field, broken JSON; 404 with a marker for a model; 401 with a marker for a key
        for wrong in ({"temperature": 9}, {MARKER: 1}, {"max_tokens": MARKER}, {"stop": [prompt] * 9}):
            answer = await client.post("/v1/completions", json=asked | wrong)
            assert answer.status_code == 400, answer.text
            bodies.append("" if MARKER in wrong or MARKER in wrong.values() else answer.text)
        broken = await client.post("/v1/completions", content=f'{{"prompt": "{prompt}", '.encode())
        assert broken.status_code == 400
        unknown = await client.post("/v1/completions", json=asked | {"model": "nobody"})
        assert unknown.status_code == 404
        stranger = await client.get("/v1/models", headers={"Authorization": f"Bearer {ALPHA}-wrong"})
        assert stranger.status_code == 401
        bodies += [broken.text, unknown.text, stranger.text]
    async with stack.client(THRIFTY) as client:
        # 429
        answers = [await client.post("/v1/completions", json=asked) for _ in range(2)]
        assert sorted(answer.status_code for answer in answers) == [200, 429]
        bodies += [answer.text for answer in answers if answer.status_code == 429]
    async with stack.client() as client:
        # a worker fails, and the request is sent again
        stream = asyncio.create_task(read(client, asked | {"max_tokens": 800}))
        await eventually(lambda: flows(stack))
        await asyncio.to_thread(kill, stack.baton, stack.baton.pid("decode"))
        assert (await stream).finish == "length"
    stack.trace_of(**{"baton.max_tokens": 800, "baton.tenant": "alpha-tenant", "baton.epoch": 2})
    await asyncio.to_thread(recovered, stack.baton, 2)
    # Then no key, no prompt and no user is in spans, logs, metrics, on NATS or in what clients were told
    secrets = [MARKER.encode(), MAIL.encode(), b"keymarker", b"tailmarker"]
    places = {
        "spans": b"".join(stack.traces.bodies),
        "logs and stores": b"".join(path.read_bytes() for path in stack.baton.files()),
        "metrics": "".join(stack.scrape().values()).encode(),
        "NATS": b"".join(stack.messages),
        "errors": "".join(bodies).encode(),
        "traces": json.dumps([stack.baton.get("/baton/traces?limit=200")]).encode(),
    }
    assert all(places.values())
    assert len(stack.messages) > 500
    assert {place: secret for place, text in places.items() for secret in secrets if secret in text} == {}
    # and a tenant is named by its attribute alone
    tenants = {tenant["id"] for tenant in TENANTS}
    for span in stack.spans():
        named = {key for key, value in span["attributes"].items() if value in tenants}
        assert named <= {"baton.tenant"}, span
    assert not [tenant for tenant in tenants if tenant.encode() in places["metrics"]]
    await stack.canary()


# ---------------------------------------------------------------------------------------------- OP-65


@pytest.mark.parametrize("requests", [900, pytest.param(4500, marks=pytest.mark.long)])
async def test_op65_label_explosion(stack: Observed, requests: int) -> None:
    """2,000 models, 2,000 paths and 500 users in the long run; a fifth of them in every run."""
    rng = random.Random(65)

    def strange() -> str:
        return f"x{rng.getrandbits(64):016x}"

    async def send(client: httpx.AsyncClient, count: int) -> None:
        turns = asyncio.Semaphore(16)

        async def one(number: int) -> None:
            async with turns:
                kind = number % 9
                if kind < 4:  # 4 of 9: a model nobody serves
                    wanted, answer = 404, await client.post("/v1/completions", json=body("x", 1) | {"model": strange()})
                elif kind < 8:  # 4 of 9: a path that does not exist
                    wanted, answer = 404, await client.get(f"/v1/{strange()}/{strange()}?{strange()}={strange()}")
                else:  # 1 of 9: a user, and a header of its own
                    headers = {"x-request-id": strange(), strange(): strange()}
                    asked = body([1000 + number % 50], 1, user=strange())
                    wanted, answer = 200, await client.post("/v1/completions", json=asked, headers=headers)
                assert answer.status_code == wanted, answer.text

        await asyncio.gather(*(one(number) for number in range(count)))

    def series() -> dict[str, int]:
        return {
            name: sum(1 for line in text.splitlines() if not line.startswith("#"))
            for name, text in stack.scrape().items()
        }

    def scrape_s() -> float:
        url = json.loads(stack.baton.run("status", "--json").stdout)["metrics"]["gateway"]
        times = []
        for _ in range(5):
            started = time.monotonic()
            httpx.get(url, timeout=10)
            times.append(time.monotonic() - started)
        return min(times)

    async with Bystander(stack), stack.client() as client:
        await send(client, 9)  # each kind once, so that what appears at its first use is there
        before, refused_before, took = series(), refused(stack), scrape_s()
        memory = sample(stack.scrape()["gateway"], "process_resident_memory_bytes")
        await send(client, requests)
    after = series()
    assert {name: after[name] - count for name, count in before.items()} == dict.fromkeys(before, 0)
    assert refused(stack) - refused_before == requests * 4 // 9
    assert scrape_s() < took * 3 + 0.05
    assert sample(stack.scrape()["gateway"], "process_resident_memory_bytes") - memory < 40e6
    await stack.canary()


def refused(stack: Observed) -> float:
    return stack.sample("gateway", names.REFUSED, reason="model_not_found")


# ---------------------------------------------------------------------------------------------- OP-66

TIMES = (names.TTFT, names.E2E, names.QUEUE_TIME, names.PREFILL_TIME, names.DECODE_TIME)


def histograms(stack: Observed) -> dict[Metric, tuple[float, float]]:
    """(observations, sum of seconds) of the times of requests."""
    text = stack.scrape()["gateway"]
    return {m: (sample(text, f"{m.name}_count"), sample(text, f"{m.name}_sum")) for m in TIMES}


def grown(stack: Observed, before: dict[Metric, tuple[float, float]]) -> dict[Metric, tuple[float, float]]:
    now = histograms(stack)
    return {m: (now[m][0] - before[m][0], now[m][1] - before[m][1]) for m in TIMES}


def near(server_s: float, client_s: float, each: int = 1) -> bool:
    """Within 10 % and 50 ms a request of what clients measured."""
    return abs(server_s - client_s) <= 0.1 * client_s + 0.05 * each


async def measured_behind_a_full_queue(stack: Observed, number: int) -> tuple[Read, dict[Metric, tuple[float, float]]]:
    """A prompt of ten chunks that comes while nothing has room; the streams before it have had their first token."""
    async with full_slots(stack, 4), stack.client() as client:
        await asyncio.sleep(0.3)
        before = histograms(stack)
        found = await read(client, body(unlike(number, 640), 8))
        await eventually(lambda: grown(stack, before)[names.E2E][0] >= 1)
    return found, grown(stack, before)


async def test_op66_first_token_time_behind_a_full_queue(stack: Observed) -> None:
    attempts = []
    for number in range(661, 664):  # the machine may stall between the client and the server
        found, times = await measured_behind_a_full_queue(stack, number)
        assert found.finish == "length"
        # one observation of the first token, though its prompt took ten chunks
        assert times[names.TTFT][0] == 1
        ttft_s = times[names.TTFT][1]
        # the time in the queue is part of it
        assert times[names.QUEUE_TIME][1] > 0
        attempts.append((ttft_s, found.ttft_s))
        if near(ttft_s, found.ttft_s):
            break
    else:
        pytest.fail(f"server and client differ: {attempts}")
    await stack.canary()


async def test_op66_preemption_does_not_begin_anew(stack: Observed) -> None:
    # Given four requests that do not fit together: 4 · (40 + 600) tokens in 2,048 slots
    preempted, before = stack.sample("decode-1", names.NUM_PREEMPTIONS), histograms(stack)
    async with stack.client() as client:
        asked = [body(unlike(670 + i, 40), 600) for i in range(4)]
        found = await asyncio.gather(*(read(client, one) for one in asked))
    await eventually(lambda: grown(stack, before)[names.E2E][0] == 4)
    # Then some were preempted, all ended, and each was entered once, with times that add up
    assert stack.sample("decode-1", names.NUM_PREEMPTIONS) > preempted
    assert [one.finish for one in found] == ["length"] * 4
    times = grown(stack, before)
    assert {count for count, _ in times.values()} == {4}
    total_s = times[names.E2E][1]
    parts_s = sum(times[m][1] for m in (names.QUEUE_TIME, names.PREFILL_TIME, names.DECODE_TIME))
    assert abs(total_s - parts_s) < 0.05 * total_s + 0.2
    assert near(times[names.TTFT][1], sum(one.ttft_s for one in found), each=8)
    await stack.canary()


async def test_op66_aborted_requests_are_not_entered(stack: Observed) -> None:
    aborted = stack.sample("gateway", names.REQUEST_SUCCESS, finished_reason="abort")
    async with full_slots(stack, 4), stack.client() as client:
        await asyncio.sleep(0.3)
        before = histograms(stack)
        waiting = asyncio.create_task(client.post("/v1/completions", json={**body("x", 5), "stream": True}))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await eventually(lambda: stack.sample("gateway", names.REQUEST_SUCCESS, finished_reason="abort") == aborted + 1)
        assert grown(stack, before)[names.TTFT] == (0, 0)
    times = grown(stack, before)
    # the four streams have ended since; nobody entered the one that left
    assert times[names.E2E][0] == times[names.DECODE_TIME][0] == 4
    assert times[names.TTFT][0] == 0
    await stack.canary()


# ---------------------------------------------------------------------------------------------- what is shown at all


async def test_every_process_shows_what_the_table_says(stack: Observed) -> None:
    await stack.canary()
    shown = stack.scrape()
    services = {name: name.removesuffix("-1") for name in shown}
    assert set(services.values()) >= {"gateway", "batch", *SERVICES}
    for process, service in services.items():
        wanted = {metric.exposed for metric in names.of_service(service) if "tenant" not in metric.labels}
        found = {line.split()[2] for line in shown[process].splitlines() if line.startswith("# TYPE ")}
        assert {name for name in found if name.startswith(("vllm:", "baton_"))} == wanted, process
    # what a request leaves behind in each of them
    for process, metric in (
        ("policy", names.ADMISSIONS),
        ("policy", names.SETTLEMENTS),
        ("policy", names.BILLED_TOKENS),
        ("scheduler", names.PLACEMENTS),
        ("decode-1", names.GENERATION_TOKENS),
        ("decode-1", names.PROMPT_TOKENS),
        ("decode-1", names.COMPUTED_TOKENS),
    ):
        assert sample(shown[process], metric.exposed) > 0, metric.name
    assert sample(shown["scheduler"], names.LIVE_WORKERS.name) == 2
    assert sample(shown["decode-1"], names.HEADROOM.name) == sample(shown["decode-1"], names.POOL_BYTES.name) > 0
    assert sample(shown["gateway"], names.SPANS_DROPPED.exposed) == 0
