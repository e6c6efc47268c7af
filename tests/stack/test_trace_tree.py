"""One connected trace a request through every service, without a word of the prompt or a key, here or in any log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.stack.running import MODEL, Baton, until

pytestmark = pytest.mark.model

MARKER = "Quetzalcoatlus"
LONG_PROMPT = f"Here is a list about {MARKER}. " + " ".join(f"Item {i} is blue;" for i in range(85))
PARENTS = {
    "gateway.tokenize": "gateway.request",
    "policy.admit": "gateway.request",
    "gateway.stream": "gateway.request",
    "scheduler.submit": "gateway.request",
    "scheduler.place": "gateway.request",
    "policy.settle": "gateway.request",
    "index.match": "scheduler.place",
    "decode.reserve": "scheduler.place",
    "decode.run": "scheduler.place",
}
HANDOFF_PARENTS = {"prefill.run": "scheduler.place", "handoff.pull": "scheduler.place"}
SERVICES = {"gateway", "policy", "scheduler", "prefix-cache-index", "decode"}


def ask(stack: Baton, prompt: str | list[int], **options: Any) -> str:
    """The answer's id."""
    more = {"max_tokens": 3, "temperature": 0} | options
    return stack.openai().completions.create(model=MODEL, prompt=prompt, **more).id


def one_tree(spans: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Spans by name, after checking that they are one tree inside the root's time. Each name comes once."""
    by_name = {span["name"]: span for span in spans}
    assert len(by_name) == len(spans), sorted(span["name"] for span in spans)
    assert len({span["trace_id"] for span in spans}) == 1
    roots = [span for span in spans if not span["parent_id"]]
    assert [root["name"] for root in roots] == ["gateway.request"]
    ids = {span["span_id"] for span in spans}
    assert all(span["parent_id"] in ids for span in spans if span["parent_id"])
    assert all(roots[0]["start_ns"] <= span["start_ns"] <= span["end_ns"] for span in spans)
    return by_name


def assert_parents(by_name: dict[str, dict[str, Any]], parents: dict[str, str]) -> None:
    found = {name: by_name[name]["parent_id"] for name in parents}
    assert found == {name: by_name[parent]["span_id"] for name, parent in parents.items()}


def test_a_short_prompt_stays_local(stack: Baton) -> None:
    # When two tokens are sent after a block that is cached
    prompt = list(range(1000, 1034))
    ask(stack, prompt)
    spans = one_tree(stack.trace(ask(stack, prompt), *PARENTS))
    # Then the trace has every service but prefill, and both estimates that kept it local
    assert spans.keys() == {"gateway.request", *PARENTS}
    assert_parents(spans, PARENTS)
    assert {span["service"] for span in spans.values()} == SERVICES
    place = spans["scheduler.place"]["attributes"]
    assert (place["baton.path"], place["baton.reason"]) == ("local", "estimate")
    assert 0 < place["baton.estimate.local_s"] <= place["baton.estimate.handed_off_s"]
    assert spans["index.match"]["attributes"]["baton.matched_blocks"] == 1


@contextmanager
def busy_decode(stack: Baton, streams: int = 6, at_once: int = 3) -> Iterator[None]:
    """Streams that keep the decode worker busy, so that a long prompt there would hold them up. Some may end early."""
    client = stack.openai()
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "temperature": 1, "stream": True}
    running = [client.completions.create(prompt=f"Stream {i}:", **options) for i in range(streams)]
    try:
        until(lambda: sum(worker["running"] for worker in stack.get("/baton/cluster")["workers"]) >= at_once)
        yield
    finally:
        for stream in running:
            stream.close()


def test_a_long_prompt_is_handed_off(stack: Baton) -> None:
    # When about 600 tokens are sent that nobody holds, while the decode worker has streams to serve
    with busy_decode(stack):
        answer = ask(stack, LONG_PROMPT)
    # Then the trace goes through all six services
    spans = one_tree(stack.trace(answer, *PARENTS, *HANDOFF_PARENTS))
    assert spans.keys() == {"gateway.request", *PARENTS, *HANDOFF_PARENTS}
    assert_parents(spans, PARENTS | HANDOFF_PARENTS)
    assert {span["service"] for span in spans.values()} == SERVICES | {"prefill"}
    # And says why, what was computed where, and how many bytes moved
    place, root = spans["scheduler.place"]["attributes"], spans["gateway.request"]["attributes"]
    assert (place["baton.path"], root["baton.path"]) == ("handed_off", "handed_off")
    assert 0 < place["baton.estimate.handed_off_s"] < place["baton.estimate.local_s"]
    assert root["baton.prompt_tokens"] > 500
    pull = spans["handoff.pull"]["attributes"]
    assert pull["baton.bytes"] > root["baton.prompt_tokens"] * 20_000
    assert spans["prefill.run"]["attributes"]["baton.computed_tokens"] == root["baton.prompt_tokens"] - 1
    assert root["baton.ttft_s"] > 0
    # And the waterfall shows it
    shown = stack.run("trace", answer)
    assert shown.returncode == 0, shown.stderr
    for words in ("prefill.run", "handoff.pull", "path=handed_off", "local=", "MiB"):
        assert words in shown.stdout
    assert MARKER not in json.dumps(list(spans.values())) + shown.stdout
    listed = stack.run("trace").stdout
    assert answer.removeprefix("cmpl-")[:12] in listed
    assert MARKER not in listed


def test_no_prompt_and_no_key_is_written_anywhere(stack: Baton) -> None:
    # Given a request that ran and one that was refused, both with a word that stands nowhere else
    assert stack.record is not None
    ask(stack, f"Tell me about {MARKER}", stop=[f"{MARKER}!"])
    with pytest.raises(Exception, match="temperature"):
        ask(stack, f"Tell me about {MARKER}", temperature=9)
    # Then neither it nor a key is in a log or a store of the stack
    secrets = {MARKER, stack.record.api_key, stack.record.admin_key}
    secrets |= {path.read_text().strip() for path in (stack.folder / "secrets").glob("nats-*")}
    found = []
    for path in stack.files():
        data = path.read_bytes()
        found += [path.name for secret in secrets if secret.encode() in data]
    assert not found
    assert (stack.folder / "logs" / "gateway.log").stat().st_size > 0


def test_twenty_requests_at_once_give_twenty_traces(stack: Baton) -> None:
    # When twenty are sent together
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda i: ask(stack, list(range(2000 + i, 2040 + i))), range(20)))
    # Then each has a whole trace of its own
    traces = [one_tree(stack.trace(answer, *PARENTS)) for answer in answers]
    assert len({spans["gateway.request"]["trace_id"] for spans in traces}) == 20
    requests = [spans["gateway.request"]["attributes"]["baton.request_id"] for spans in traces]
    assert [request.removeprefix("req-") for request in requests] == [a.removeprefix("cmpl-") for a in answers]
    assert all(8 <= len(spans) <= 14 for spans in traces)
    until(stack.idle, 20)
