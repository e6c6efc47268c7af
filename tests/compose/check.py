"""`python -m tests.compose.check`: the users' compose.yaml, brought up and used; one line a step, 0 when all held.

Needs a Docker engine. It uses a project and volumes of its own and takes them away at the end.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from openai.types import Batch

from shared.contracts.subjects import SERVICES
from tests.answer_watch import WATCH
from tests.compose import observing
from tests.compose.project import Project
from tests.stack.running import MODEL, until

USUAL = ("nats", "redis", "policy", "prefix_cache_index", "scheduler", "gateway", "batch", "prefill", "decode")
STREAM_TOKENS = 32
BATCH_LINES = 12
PROMPT_TOKENS, HANDOFF_TRIES = 600, 3
KV_BYTES_PER_TOKEN = 20_000
"""Less than one token's KV of the default model takes, in bfloat16 too."""


def starts(project: Project) -> str:
    """Every service is healthy, one container each."""
    began = time.monotonic()
    project.up()
    serving = project.serving()
    assert {name: serving.get(name) for name in USUAL} == dict.fromkeys(USUAL, 1), serving
    return f"{len(USUAL)} services healthy in {time.monotonic() - began:.1f} s"


def streams(project: Project) -> str:
    """A chat completion comes token by token through the OpenAI client."""
    began, arrivals, text = time.monotonic(), [], ""
    stream = project.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three rivers of Europe."}],
        stream=True,
        max_tokens=STREAM_TOKENS,
        temperature=0,
    )
    for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            arrivals.append(time.monotonic() - began)
            text += piece
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    # An answer that is sent whole has one arrival, or many at one moment.
    apart = sum(gap > 0.0005 for gap in gaps)
    assert len(arrivals) > 8, f"{len(arrivals)} pieces"
    assert apart > len(gaps) / 2, f"only {apart} of {len(gaps)} pieces came apart"
    return (
        f"{len(arrivals)} pieces, {len(text)} characters; first after {arrivals[0]:.2f} s, "
        f"then every {1000 * statistics.median(gaps):.0f} ms"
    )


def hands_off(project: Project) -> str:
    """A prompt of 600 tokens that nobody holds goes through the prefill worker, and its KV moves.

    A machine that is busy with other things may let the prefill worker's lease run out, and the prompt is then computed
    locally, as it should be: so it may be tried again, with the reason told.
    """
    missed: list[str] = []
    for _ in range(HANDOFF_TRIES):
        prompt = f"Here is a list of {time.time_ns()} things. " + " ".join(f"Item {i} is blue;" for i in range(85))
        with busy_decode(project):
            answer = project.ask(prompt)
        spans = project.trace(answer, "gateway.request", "scheduler.place", "decode.run")
        request, place, run = spans["gateway.request"], spans["scheduler.place"], spans["decode.run"]
        tokens = request["baton.prompt_tokens"]
        assert tokens >= PROMPT_TOKENS, tokens
        told = f"path={run['baton.path']}, {tokens} tokens, estimates " + ", ".join(
            f"{path} {place[f'baton.estimate.{path}_s']:.2f} s" for path in ("handed_off", "local")
        )
        if run["baton.path"] == "handed_off":
            pulled = project.trace(answer, "prefill.run", "handoff.pull")
            assert pulled["prefill.run"]["baton.computed_tokens"] == tokens - 1, pulled
            num_bytes = pulled["handoff.pull"]["baton.bytes"]
            assert num_bytes > tokens * KV_BYTES_PER_TOKEN, num_bytes
            tries = f"; before that {missed}" if missed else ""
            return f"{told}, bytes={num_bytes}, first token after {request['baton.ttft_s']:.2f} s{tries}"
        missed.append(f"{told}, placed {place['baton.path']}: {place['baton.reason'] or run['baton.reason']}")
    raise AssertionError(f"not handed off: {missed}")


@contextmanager
def busy_decode(project: Project, count: int = 3) -> Iterator[None]:
    """Streams that keep decode workers busy, so that a long prompt there would hold them up."""
    client = project.openai()
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "temperature": 1, "stream": True}
    running = [client.completions.create(prompt=f"Stream {i}:", **options) for i in range(count)]
    try:
        until(lambda: sum(worker["running"] for worker in project.get("/baton/cluster")["workers"]) == count, 60)
        yield
    finally:
        for stream in running:
            stream.close()


def batches(project: Project) -> str:
    """A batch of chat completions by file: every line is answered once; one with a bad line is refused whole."""
    client, began = project.openai(), time.monotonic()
    lines = [batch_line(i) for i in range(BATCH_LINES)]
    done = run_batch(client, lines)
    assert done.status == "completed", done
    assert done.request_counts is not None
    counts = (done.request_counts.total, done.request_counts.completed, done.request_counts.failed)
    assert counts == (BATCH_LINES, BATCH_LINES, 0), counts
    assert done.output_file_id is not None
    answered = [json.loads(line)["custom_id"] for line in client.files.content(done.output_file_id).text.splitlines()]
    assert sorted(answered) == sorted(line["custom_id"] for line in lines), answered
    took_s = time.monotonic() - began
    refused = run_batch(client, [batch_line(0), batch_line(0)])
    assert refused.status == "failed", refused
    return f"{BATCH_LINES} lines answered once each in {took_s:.1f} s; a batch with a custom_id twice is refused"


def batch_line(number: int) -> dict[str, Any]:
    question = [{"role": "user", "content": f"What is {number} and {number}?"}]
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": question}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def run_batch(client: OpenAI, lines: list[dict[str, Any]]) -> Batch:
    """Upload, start, and wait for the end, whatever it is."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return until(lambda: ended(client, batch.id), 300, lambda: client.batches.retrieve(batch.id))


def ended(client: OpenAI, batch_id: str) -> Batch | None:
    found = client.batches.retrieve(batch_id)
    return found if found.status in ("completed", "failed", "expired", "cancelled") else None


QUEUE_PROGRAM = """
import asyncio, json, nats
from nats.errors import NoRespondersError
async def ask(queue, subject, body):
    while True:
        try:
            return json.loads((await queue.request(subject, json.dumps(body).encode(), timeout=5)).data)
        except NoRespondersError:  # the service opens a new tenant's queue within seconds
            await asyncio.sleep(0.5)
async def main(user, password, inbox, submit, results, line):
    queue = await nats.connect("nats://nats:4222", user=user, password=password, inbox_prefix=inbox)
    await ask(queue, submit, line)
    while not (answers := (await ask(queue, results, {"limit": 10}))["data"]):
        await asyncio.sleep(0.5)
    print(json.dumps([[answer["custom_id"], answer["response"]["status_code"]] for answer in answers]))
    await queue.close()
asyncio.run(asyncio.wait_for(main(*json.loads(input())), 120))
"""


def queues(project: Project) -> str:
    """A tenant gets a NATS user of its own, publishes a line with it and reads the answer."""
    shown = project.compose("run", "--rm", "--no-deps", "--no-TTY", "setup", "nats-key", "demo")
    fields = dict(line.split(None, 1) for line in shown.splitlines() if len(line.split()) == 2)
    for _ in range(2):
        project.compose("kill", "--signal", "HUP", "nats")
        time.sleep(1)
    tenant = ("tenant-demo", fields["password"], "_INBOX_tenant_demo")
    told = (*tenant, "baton.v1.batch.submit.demo", "baton.v1.batch.results.demo", batch_line(1))
    answers = json.loads(project.python("batch", QUEUE_PROGRAM, json.dumps(told)))
    assert answers == [["line-1", 200]], answers
    return "a line published by the tenant's own NATS user is answered"


def scales(project: Project) -> str:
    """`--scale decode=2` adds a decode worker, and both serve."""
    project.up("--no-recreate", "--scale", "decode=2")
    assert project.serving()["decode"] == 2
    workers = until(lambda: decode_workers(project) if len(decode_workers(project)) == 2 else None, 60)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: project.ask(f"Number {i} of {time.time_ns()} is", 16), range(8)))
    traces = [project.trace(answer, "scheduler.place", "decode.run") for answer in answers]
    served = [trace["scheduler.place"]["baton.decode_worker"] for trace in traces]
    assert set(served) == workers, f"{served} of {workers}"
    return f"8 requests at once: {' and '.join(str(served.count(worker)) for worker in sorted(workers))}"


MAPPED_PROGRAM = """
import json
from pathlib import Path
found = set()
for maps in Path("/proc").glob("[0-9]*/maps"):
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        continue
    found |= {tuple(line.split()[3:6]) for line in lines if line.endswith(".pack")}
print(json.dumps(sorted(found)))
"""


def computes(project: Project) -> str:
    """Workers compute by the image's native kernels; weights are packed once, by one of them, and mapped by all.

    Where the volume's file system has no huge pages, workers may take a copy each of what one has packed.
    """
    workers = project.get("/baton/cluster")["workers"]
    numerics = {worker["numerics"] for worker in workers}
    assert len(numerics) == 1, numerics
    assert "-native-" in next(iter(numerics)), numerics
    logs = project.logs("prefill", "decode").splitlines()
    assert not any("torch computes instead" in line or "own in memory" in line for line in logs), logs
    packed = [line for line in logs if "packing weights, once" in line]
    assert len(packed) == 1, packed
    told = f"{len(workers)} workers of {next(iter(numerics))}, weights packed once"
    if copied := [line for line in logs if "copied into huge pages" in line]:
        return f"{told}, copied into huge pages by {len(copied)}"
    mapped = [json.loads(project.python(worker, MAPPED_PROGRAM)) for worker in ("prefill", "decode")]
    assert mapped[0] == mapped[1], mapped
    assert len(mapped[0]) == 1, mapped
    return f"{told}, one file mapped by both"


def decode_workers(project: Project) -> set[str]:
    return {worker["id"] for worker in project.get("/baton/cluster")["workers"] if worker["role"] == "decode"}


def restarts(project: Project) -> str:
    """`down` leaves nothing running; the next `up` has the same keys, the same ledger and the same packed weights."""
    project.up("--no-recreate", "--scale", "decode=1")
    key, before = project.api_key, until(lambda: settled(project), 30)
    began = time.monotonic()
    project.down()
    stopped_s = time.monotonic() - began
    assert project.containers() == []
    assert project.port_is_free()
    project.up()
    assert project.api_key == key
    assert usage(project) == before
    assert "packing weights" not in project.logs("prefill", "decode")
    project.ask("Good morning")
    after = until(lambda: usage(project) if usage(project) != before else None, 30)
    return (
        f"down in {stopped_s:.1f} s with no container left; after up: same keys and packed weights, "
        f"{before['completion_tokens']} output tokens in the ledger, then {after['completion_tokens']}"
    )


def settled(project: Project) -> dict[str, int] | None:
    """The tenant's usage once nothing is in flight and a moment has not changed it."""
    if project.get("/baton/cluster")["gateway"]["requests"]:
        return None
    first = usage(project)
    time.sleep(1)
    return first if first and usage(project) == first else None


def usage(project: Project) -> dict[str, int]:
    """What policy's ledger holds of the demo tenant, read as policy reads it."""
    program = (
        "import asyncio, json, os\n"
        "from pathlib import Path\n"
        "from services.policy.accounts import Accounts\n"
        "from shared.contracts.ids import TenantId\n"
        "from shared.store.redis_store import connect_redis\n"
        "async def main():\n"
        "    password = Path(os.environ['BATON_REDIS_PASSWORD_FILE']).read_text().strip()\n"
        "    async with connect_redis(os.environ['REDIS_URL'], password=password) as redis:\n"
        "        print(json.dumps(await Accounts(redis).usage(TenantId('demo'))))\n"
        "asyncio.run(main())\n"
    )
    return {name: int(float(value)) for name, value in json.loads(project.python("policy", program)).items()}


def observes(project: Project, observers: list[str]) -> str:
    """What the profile `observe` shows of the use so far."""
    observing.start(project, observers)
    answer = project.ask(f"Look at {time.time_ns()}: " + " ".join(f"item {i};" for i in range(200)))
    found = []
    if "prometheus" in observers:
        # A rate needs two scrapes with something between them.
        time.sleep(12)
        project.ask("Once more")
        time.sleep(6)
        found.append(observing.prometheus_scrapes(project, len(SERVICES)))
    if "jaeger" in observers:
        found.append("jaeger: " + observing.jaeger_shows(project, project.trace_id(answer)))
    if "grafana" in observers:
        found.append("grafana: " + observing.grafana_has(project))
    return "\n           ".join(found)


STEPS: tuple[Callable[[Project], str], ...] = (starts, computes, streams, hands_off, batches, queues, scales, restarts)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose.check", description=__doc__)
    parser.add_argument("--build", action="store_true", help="build the image first")
    parser.add_argument("--keep", action="store_true", help="leave the stack running")
    parser.add_argument(
        "--observe",
        nargs="*",
        choices=observing.OBSERVERS,
        metavar="NAME",
        help=f"try the profile observe as well, or of it only {', '.join(observing.OBSERVERS)}",
    )
    options = parser.parse_args(argv)
    if absent := Project().absent():
        print(f"compose cannot be checked here: {absent}", file=sys.stderr)
        return 1
    project, steps = Project(), {step.__name__: step for step in STEPS}
    if options.observe is not None:
        observers = options.observe or list(observing.OBSERVERS)
        observing.prepare(project, observers)
        steps["observes"] = functools.partial(observes, observers=observers)
    try:
        if options.build:
            project.build()
        for name, step in steps.items():
            print(f"{name:<10} {step(project)}", flush=True)
        assert not (faults := WATCH.faults()), f"OpenAI's document does not allow what was answered: {faults}"
        print(f"{'answers':<10} held to OpenAI's document: {WATCH.told()}")
    except Exception:
        print(project.logs()[-8000:], file=sys.stderr)
        traceback.print_exc()
        return 1
    finally:
        if not options.keep:
            project.down("--volumes")
    print("compose works")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
