"""OP-07 to OP-14: seeds, neighbours, log-probabilities, biases, choices. Real workers with a tiny model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from opentelemetry.trace import INVALID_SPAN

from shared.contracts.ids import TenantId
from shared.contracts.messages import Identity
from shared.ingress.parse import parse_completion
from shared.ingress.request_plan import make_plan
from tests.conformance.real_worker import VOCABULARY, real_options, real_stack, tiny_checkpoint
from tests.conformance.support import bystander, canary, frames, refused, send
from tests.native import ALL_LEVELS, library_at
from tests.pipeline.gateway_support import TOKENIZER, Stack, chat, completion

IDENTITY = Identity(tenant=TenantId("tenant-a"), key_id="k")
KEY_A = hashlib.sha256(b"key-a").digest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
async def stack(model: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with real_stack(real_options(tmp_path, model)) as running:
        yield running


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Both ways to sample; the library is skipped where the machine has none."""
    if request.param == "native":
        library_at(ALL_LEVELS[0])
    return str(request.param)


async def answer(stack: Stack, path: str = "completions", **fields: Any) -> dict[str, Any]:
    build = chat if path.startswith("chat") else completion
    response = await send(stack, path, build(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = json.loads(response.text, parse_constant=lambda literal: pytest.fail(literal))
    return body


def text_of(body: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in body["choices"])


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.long)])
async def test_op07_neighbours_do_not_move_a_seeded_request(stack: Stack, times: int) -> None:
    wanted = {"prompt": "seeded", "seed": 7, "temperature": 0.9, "max_tokens": 32}
    alone = [text_of(await answer(stack, **wanted)) for _ in range(times)]
    beside: list[str] = []
    for seeded in (False, True):
        for _ in range(times):
            others = [
                answer(stack, prompt="other", temperature=0.9, max_tokens=32, **({"seed": i} if seeded else {}))
                for i in range(8)
            ]
            mine, *neighbours = await asyncio.gather(answer(stack, **wanted), *others)
            beside.append(text_of(mine))
            if not seeded:
                assert len({text_of(neighbour) for neighbour in neighbours}) > 1
    assert set(alone + beside) == {alone[0]}
    await canary(stack)


@pytest.mark.parametrize(
    ("prompts", "others", "rounds"), [(6, 20, 1), pytest.param(20, 180, 3, marks=pytest.mark.long)]
)
async def test_op08_greedy_in_a_crowd_equals_greedy_alone(stack: Stack, prompts: int, others: int, rounds: int) -> None:
    asked = [{"prompt": f"greedy {i}", "temperature": 0, "max_tokens": 8, "logprobs": 2} for i in range(prompts)]
    alone = [(await answer(stack, **one))["choices"] for one in asked]
    for _ in range(rounds):
        crowd = [answer(stack, prompt=f"crowd {i}", seed=i, max_tokens=12) for i in range(others)]
        together = await asyncio.gather(*(answer(stack, **one) for one in asked), *crowd)
        assert [body["choices"] for body in together[:prompts]] == alone
    await canary(stack)


async def test_op09_log_probabilities_are_finite_json(stack: Stack) -> None:
    body = await answer(
        stack, prompt="north south east", echo=True, logprobs=2, top_k=1, temperature=1, max_tokens=3, ignore_eos=True
    )
    choice, prompt = body["choices"][0], TOKENIZER.encode_prompt("north south east")
    scores = choice["logprobs"]
    assert choice["text"].startswith("north south east")
    lengths = {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(prompt) + 3}
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    for value, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
        assert -9999.0 <= value <= 0
        assert 2 <= len(top) <= 3
        assert all(-9999.0 <= other <= 0 for other in top.values())
    # top_k 1 draws the most likely
    for value, top in zip(scores["token_logprobs"][-3:], scores["top_logprobs"][-3:], strict=True):
        assert value == max(top.values())
    await canary(stack)


async def test_op09_a_prompt_scores_alike_as_an_output_does(stack: Stack) -> None:
    """What greedy decoding scored, the same tokens score as a prompt: one model, one way to compute it."""
    prompt = list(TOKENIZER.encode("score me"))
    first = await answer(stack, prompt=prompt, temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    streamed = first["choices"][0]["logprobs"]
    ids = [id_of(name) for name in streamed["tokens"]]
    again = await answer(stack, prompt=[*prompt, *ids], echo=True, logprobs=3, temperature=0, max_tokens=1)
    scored = again["choices"][0]["logprobs"]
    assert scored["token_logprobs"][len(prompt) : len(prompt) + 6] == streamed["token_logprobs"]
    assert scored["tokens"][len(prompt) : len(prompt) + 6] == streamed["tokens"]


def id_of(name: str) -> int:
    return next(i for i in range(VOCABULARY) if name_of(i) == name)


def name_of(token_id: int) -> str:
    raw = TOKENIZER.token_bytes(token_id, skip_special=False)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def test_op10_logit_bias(stack: Stack) -> None:
    async with bystander(stack):
        for bias in ({str(VOCABULARY): 5}, {"-1": 5}, {"99999999": -100}, {"abc": 1}, {"5": 101}, {"5": True}, [5]):
            await refused(stack, "completions", completion(logit_bias=bias), "logit_bias")
            await refused(stack, "chat/completions", chat(logit_bias=bias), "logit_bias")
    forced = await answer(stack, temperature=0, max_tokens=3, logit_bias={"70": 100})
    assert forced["choices"][0]["text"] == TOKENIZER.decode([70]) * 3
    banned = await answer(stack, temperature=0, max_tokens=3, logit_bias={"70": 100, "71": 100, "72": -100})
    assert TOKENIZER.decode([72]) not in banned["choices"][0]["text"]
    await canary(stack)


async def test_op13_several_choices(stack: Stack) -> None:
    asked = {"n": 4, "temperature": 1, "max_tokens": 8, "seed": 3}
    whole = await answer(stack, **asked)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) > 1
    prompt = len(TOKENIZER.encode_prompt("hi"))
    usage = whole["usage"]
    assert usage["prompt_tokens"] == prompt
    settled = (await stack.settled())[0]
    assert (settled.prompt_tokens, settled.completion_tokens) == (prompt, usage["completion_tokens"])
    assert stack.backend.admits[-1].choices == 4
    # streamed, the same texts; one finish reason each
    options = {"stream": True, "stream_options": {"include_usage": True}}
    got = frames(await send(stack, "completions", completion(**asked, **options)))
    texts, finishes = dict.fromkeys(range(4), ""), {i: [] for i in range(4)}  # type: ignore[var-annotated]
    for event in got[:-2]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            finishes[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert finishes == {choice["index"]: [choice["finish_reason"]] for choice in whole["choices"]}
    # of the second request the prompt may be in the cache
    assert got[-2]["usage"]["completion_tokens"] == usage["completion_tokens"]
    async with bystander(stack):
        for n in (0, -1, 1_000_000, "2", True):
            await refused(stack, "completions", completion(n=n), "n")
        crowd = await asyncio.gather(*(answer(stack, **asked) for _ in range(8)))
    assert [body["choices"] for body in crowd] == [whole["choices"]] * 8
    await canary(stack)


@pytest.mark.long
async def test_op13_several_choices_fifty_times_at_load_sixteen(stack: Stack) -> None:
    slots = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        asked = {"prompt": f"prompt {number % 5}", "n": 4, "temperature": 1, "max_tokens": 16}
        async with slots:
            if number % 2:
                got = frames(await send(stack, "completions", completion(**asked, stream=True)))
                ended = [c["index"] for event in got[:-1] for c in event["choices"] if c["finish_reason"]]
                assert sorted(ended) == [0, 1, 2, 3]
            else:
                body = await answer(stack, **asked)
                assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
                assert body["usage"]["prompt_tokens"] == len(TOKENIZER.encode_prompt(asked["prompt"]))

    await asyncio.gather(*(one(number) for number in range(50)))
    await stack.settled(50)
    await canary(stack)


async def test_op13_more_choices_than_a_worker_runs_are_refused(model: Path, tmp_path: Path) -> None:
    async with real_stack(real_options(tmp_path, model, max_num_seqs=4)) as stack:
        await refused(stack, "completions", completion(n=5), "n")
        await canary(stack)


async def test_several_prompts_are_one_answer(stack: Stack) -> None:
    single = [
        (await answer(stack, prompt=prompt, temperature=0, max_tokens=5))["choices"][0] for prompt in ("one", "two")
    ]
    both = await answer(stack, prompt=["one", "two"], temperature=0, max_tokens=5)
    assert [choice["text"] for choice in both["choices"]] == [choice["text"] for choice in single]
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert both["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode_prompt(text)) for text in ("one", "two"))
    got = frames(await send(stack, "completions", completion(["one", "two"], stream=True, n=2, max_tokens=3, seed=1)))
    assert {choice["index"] for event in got[:-1] for choice in event["choices"]} == {0, 1, 2, 3}
    await canary(stack)


async def test_the_first_of_several_prompts_that_fails_ends_the_answer(stack: Stack) -> None:
    await refused(stack, "completions", completion([[1, 2], [VOCABULARY]]), "prompt")
    await refused(stack, "completions", completion([[1] * 200, [2] * 600]), "prompt")
    await canary(stack)
    await stack.settled()


async def test_penalties_and_filters_have_effect(stack: Stack) -> None:
    away = await answer(stack, temperature=0, max_tokens=24, ignore_eos=True)
    kept = await answer(stack, temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=2, presence_penalty=2)
    assert kept["choices"][0]["text"] != away["choices"][0]["text"]
    # min_p 1 leaves the most likely alone
    sure = await answer(stack, temperature=2, seed=9, min_p=1, max_tokens=8)
    greedy = await answer(stack, temperature=0, max_tokens=8)
    assert text_of(sure) == text_of(greedy)


async def test_ends_by_token_and_not_before_the_least(stack: Stack) -> None:
    forced = {"temperature": 0, "max_tokens": 9, "logit_bias": {"70": 100}}
    shown = TOKENIZER.decode([70])
    ended = await answer(stack, **forced, stop_token_ids=[70])
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    kept = await answer(stack, **forced, stop_token_ids=[70], include_stop_str_in_output=True)
    assert (kept["choices"][0]["text"], kept["usage"]["completion_tokens"]) == (shown, 1)
    late = await answer(stack, **forced, stop_token_ids=[70], min_tokens=4)
    assert late["usage"]["completion_tokens"] >= 5
    assert shown not in late["choices"][0]["text"]
    stopped = await answer(stack, **forced, stop=[shown * 2])
    assert (stopped["choices"][0]["text"], stopped["usage"]["completion_tokens"]) == ("", 2)
    with_stop = await answer(stack, **forced, stop=[shown * 2], include_stop_str_in_output=True)
    assert with_stop["choices"][0]["text"] == shown * 2
    behind = await answer(stack, **forced, stop=[shown], min_tokens=3)
    assert (behind["choices"][0]["text"], behind["choices"][0]["finish_reason"]) == (shown * 3, "stop")
    end = {"temperature": 0, "max_tokens": 6, "logit_bias": {"2": 100}}
    assert (await answer(stack, **end))["usage"]["completion_tokens"] == 1
    assert (await answer(stack, **end, ignore_eos=True))["usage"]["completion_tokens"] == 6
    assert (await answer(stack, **end, min_tokens=3))["usage"]["completion_tokens"] == 4
    await refused(stack, "completions", completion(max_tokens=3, min_tokens=4), "min_tokens")
    await refused(stack, "completions", completion(stop_token_ids=[VOCABULARY]), "stop_token_ids")


async def test_chat_scores_have_bytes_and_stream_alike(stack: Stack) -> None:
    asked = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    whole = (await answer(stack, "chat/completions", **asked))["choices"][0]
    entries = whole["logprobs"]["content"]
    assert len(entries) == 6
    for entry in entries:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        mass = sum(math.exp(top["logprob"]) for top in entry["top_logprobs"])
        assert 0 < mass <= 1 + 1e-5
    got = frames(await send(stack, "chat/completions", chat(**asked, stream=True)))
    streamed = [
        entry
        for event in got[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


async def test_a_lost_worker_changes_no_penalty_no_score_and_no_end(model: Path, tmp_path: Path, kernels: str) -> None:
    asked = {
        "prompt": "resumed",
        "seed": 5,
        "temperature": 0.8,
        "max_tokens": 60,
        "ignore_eos": True,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.3,
        "logprobs": 2,
        "echo": True,
    }
    async with real_stack(real_options(tmp_path, model, kernels=kernels), num_workers=3) as stack:
        alone = await answer(stack, **asked)
        for n in (1, 2):
            wanted = alone if n == 1 else await answer(stack, **asked, n=2)
            before = len(stack.backend.reserves)
            running = asyncio.create_task(answer(stack, **asked, n=n))
            async with asyncio.timeout(30):
                while len(stack.backend.reserves) == before or not committed(stack):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await stack.backend.lose_first_worker()
            assert (await running)["choices"] == wanted["choices"]
        assert len({reserve.attempt.epoch for reserve in stack.backend.reserves}) == 2


def committed(stack: Stack) -> int:
    return sum(session.stream.num_committed for session in stack.service.ingress.sessions.values())


async def test_a_reader_too_slow_for_scores_is_cut_off(model: Path, tmp_path: Path) -> None:
    """Scores are many times their text: what waits for a client is counted with them."""
    asked = {"stream": True, "max_tokens": 300, "ignore_eos": True, "seed": 1, "temperature": 1}
    limits = {"max_unsent_bytes": 128 * 1024, "tick_s": 0.01}
    async with real_stack(real_options(tmp_path, model), **limits) as stack:
        for scores, finish in ((None, "length"), (20, "cancelled")):
            parsed = parse_completion(json.dumps(completion(**asked, logprobs=scores)).encode())
            plan = make_plan(parsed, [5, 6, 7], next(iter(stack.service.models)), identity=IDENTITY, seed=1)
            session = await stack.service.open(plan, KEY_A, span=INVALID_SPAN, arrived=time.monotonic())
            await asyncio.wait_for(session.over.wait(), 30)  # nobody takes anything
            assert session.end is not None
            assert session.end.finish == finish


async def test_the_official_client_reads_choices_and_scores(stack: Stack) -> None:
    url = "http://gateway/v1"
    client = AsyncOpenAI(api_key="key-a", base_url=url, http_client=stack.client, _strict_response_validation=True)
    ended = {"max_tokens": 4, "seed": 2, "extra_body": {"ignore_eos": True}}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    chatted = await client.chat.completions.create(
        model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=2, **ended
    )
    assert [choice.index for choice in chatted.choices] == [0, 1]
    for choice in chatted.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 4
    completed = await client.completions.create(
        model="tiny", prompt=["one", "two"], logprobs=1, presence_penalty=0.5, logit_bias={"70": 2}, **ended
    )
    scores = [choice.logprobs for choice in completed.choices]
    assert [len(found.token_logprobs or ()) for found in scores if found] == [4, 4]
    seen: dict[int, list[float]] = {0: [], 1: []}
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, n=2, logprobs=True, stream=True, **ended
    )
    async for event in stream:
        for part in event.choices:
            entries = part.logprobs.content if part.logprobs else None
            seen[part.index] += [entry.logprob for entry in entries or ()]
    told = [choice.logprobs.content or [] for choice in chatted.choices if choice.logprobs]
    assert list(seen.values()) == [[entry.logprob for entry in entries] for entries in told]


async def test_each_choice_stops_by_itself(stack: Stack) -> None:
    asked = {"n": 3, "seed": 11, "temperature": 1, "max_tokens": 24, "ignore_eos": True}
    whole = [choice["text"] for choice in (await answer(stack, **asked))["choices"]]
    letters = {char for text in whole for char in text if char.isascii() and char.isalnum()}
    stop = min(letters, key=lambda char: (-sum(char in text for text in whole), char))
    body = await answer(stack, **asked, stop=stop)
    for choice, text in zip(body["choices"], whole, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (
            text.partition(stop)[0],
            "stop" if stop in text else "length",
        )
    assert any(stop in text for text in whole)
    settled = (await stack.settled(2))[-1]
    assert settled.completion_tokens == body["usage"]["completion_tokens"] < 72


async def test_tiers_and_timings_are_told_when_asked_for(stack: Stack) -> None:
    plain = await answer(stack, max_tokens=2)
    assert plain.keys().isdisjoint({"service_tier", "timings"})
    for tier, klass, served in (
        ("auto", "", "default"),
        ("priority", "interactive", "priority"),
        ("flex", "analysis", "default"),
    ):
        body = await answer(stack, "chat/completions", max_tokens=2, service_tier=tier)
        # the policy of these tests grants class interactive, whatever is asked
        assert (body["service_tier"], stack.backend.admits[-1].klass) == (served, klass)
    timed = await answer(stack, max_tokens=3, timings=True, ignore_eos=True)
    told = timed["timings"]
    assert 0 <= told["queue_ms"] <= told["first_token_ms"] <= told["total_ms"]
    assert told["tokens_per_second"] > 0
    options = {"stream": True, "stream_options": {"include_usage": True}, "timings": True}
    got = frames(await send(stack, "chat/completions", chat(max_tokens=2, **options)))
    assert "timings" in got[-2]
    assert not any("timings" in event for event in got[:-2])
