"""OP-50 to OP-52: what speculation may not change. Real workers with a tiny model, with and without it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.batcher_gauges import Gauges
from shared.engine.draft_costs import DraftCosts
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.engine.step_time import StepTimeModel
from shared.engine.worker_engine import WorkerEngine
from shared.kv.layout import PoolLayout
from shared.kv.pool import create_pool
from shared.model.config import layer_groups
from shared.model.decoder import Model, load_decoder
from tests.conformance.real_worker import VOCABULARY, RealBackend, real_options, real_stack, tiny_checkpoint
from tests.conformance.support import canary, refused, send
from tests.pipeline.gateway_support import TOKENIZER, Stack, chat, completion
from tests.tiny_models import make_tiny_model, random_tokens

MOST = 6
FREE_ROWS = StepTimeModel(0.0, 1e-6, 0.0, 0.0, floor_s=0.05)
"""Guesses cost nothing, whatever this machine's steps take: what is tested is that they are made."""


@pytest.fixture(autouse=True)
def times_of_steps_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a busy machine would end guessing."""
    monkeypatch.setattr(DraftCosts, "took", lambda *times: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
async def stacks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stack, Stack]]:
    """Without speculation and with it."""
    monkeypatch.setattr(WorkerEngine, "_learn", lambda self, fit: None)
    async with AsyncExitStack() as running:
        off, on = [await running.enter_async_context(speculating(model, tmp_path, most)) for most in (0, MOST)]
        yield off, on


@asynccontextmanager
async def speculating(model: Path, folder: Path, most: int) -> AsyncIterator[Stack]:
    async with real_stack(real_options(folder, model, most_drafted=most, calibrate=False)) as stack:

        def free_rows(batcher: Batcher) -> None:
            batcher.step_model = FREE_ROWS

        await backend(stack).workers[0].shell.call(free_rows)
        yield stack


def backend(stack: Stack) -> RealBackend:
    assert isinstance(stack.backend, RealBackend)
    return stack.backend


async def gauges(stack: Stack) -> Gauges:
    return await backend(stack).workers[0].shell.call(lambda batcher: batcher.gauges())


async def answer(stack: Stack, **fields: Any) -> dict[str, Any]:
    response = await send(stack, "completions", completion(**{"temperature": 0} | fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def told(body: dict[str, Any]) -> tuple[Any, Any]:
    return body["choices"], body["usage"]["completion_tokens"]


def token_ids(names: Sequence[str]) -> list[int]:
    """The ids of tokens as log-probabilities name them."""
    known = dict[str, int]()
    for token_id in range(VOCABULARY):
        raw = TOKENIZER.token_bytes(token_id, skip_special=False)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        assert known.setdefault(name, token_id) == token_id, name
    return [known[name] for name in names]


async def test_op50_an_end_inside_an_accepted_run(stacks: tuple[Stack, Stack]) -> None:
    """What is guessed is the text itself, so that runs are accepted whole: stop strings, stop tokens and `max_tokens`
    at every place around one another end it where they end it without speculation."""
    off, on = stacks
    fields: dict[str, Any] = {"prompt": "again and again", "ignore_eos": True}
    whole = await answer(off, **fields, max_tokens=40, logprobs=0)
    names = whole["choices"][0]["logprobs"]["tokens"]
    ids = token_ids(names)
    backend(on).prediction = pack_tokens(ids)
    asked = list[dict[str, Any]]()
    for place in (9, 20):
        stop_id = next(i for i in range(place, 40) if ids[i] not in ids[:i])
        letter = next(c for c in "".join(names[place:]) if c.isascii() and c not in "".join(names[:place]))
        ends_at = next(i for i, name in enumerate(names) if letter in name)
        for offset in range(-2, MOST + 2):
            for stops, at in (({"stop_token_ids": [ids[stop_id]]}, stop_id), ({"stop": letter}, ends_at)):
                asked.append(fields | stops | {"max_tokens": at + 1 + offset, "logprobs": 1})
    answers = await asyncio.gather(*(answer(stack, **one) for one in asked for stack in (off, on)))
    ends = Counter[str]()
    for one, without, speculated in zip(asked, answers[::2], answers[1::2], strict=True):
        assert told(speculated) == told(without), one
        assert speculated["usage"]["completion_tokens"] <= one["max_tokens"]
        ends[speculated["choices"][0]["finish_reason"]] += 1
    assert min(ends["stop"], ends["length"]) > 4
    counts = await gauges(on)
    assert counts.accepted > 4 * len(asked)
    assert (await gauges(off)).drafts == 0
    await canary(on)


PROMPTS = (
    *(f"greedy {i} " + "again and again " * (i % 4) for i in range(20)),
    *(f"def f{i}(x):\n    return x + {i}\n\ndef f{i}(x):\n    return" for i in range(15)),
    *(" ".join(str(j % (2 + i)) for j in range(20)) for i in range(15)),
)
FEW = {str(token): 100 for token in (70, 71, 72)}
"""A text of three letters repeats itself sooner or later: what is guessed from it is right now and then."""


async def test_op52_greedy_is_the_same_with_speculation(stacks: tuple[Stack, Stack]) -> None:
    """One at a time (the first 12) and 16 at a time."""
    off, on = stacks
    asked = [
        {"prompt": prompt, "max_tokens": 24, "logprobs": 2, "logit_bias": FEW if i % 2 else {}}
        for i, prompt in enumerate(PROMPTS)
    ]
    places = asyncio.Semaphore(16)

    async def one(stack: Stack, fields: dict[str, Any]) -> Any:
        async with places:
            return told(await answer(stack, **fields))

    without = await asyncio.gather(*(one(off, fields) for fields in asked))
    assert [await one(on, fields) for fields in asked[:12]] == without[:12]
    assert await asyncio.gather(*(one(on, fields) for fields in asked)) == without
    counts = await gauges(on)
    assert 0 < counts.accepted < counts.drafted
    await canary(on)


async def test_a_prediction_changes_nothing_but_what_usage_tells_of_it(stacks: tuple[Stack, Stack]) -> None:
    off, on = stacks
    fields: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 24,
        "logit_bias": FEW,
        "logprobs": True,
        "ignore_eos": True,
    }
    first = await chatted(off, **fields)
    text = first["choices"][0]["message"]["content"]
    right = {"type": "content", "content": text}
    parts = {"type": "content", "content": [{"type": "text", "text": part} for part in (text[:5], text[5:])]}
    wrong = {"type": "content", "content": text[:3] + "not at all what comes"}
    for stack, prediction in ((off, right), (on, right), (on, parts), (on, wrong)):
        body = await chatted(stack, **fields, prediction=prediction)
        assert body["choices"] == first["choices"]
        details = body["usage"].pop("completion_tokens_details")
        accepted, rejected = (details.pop(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected"))
        assert body["usage"] | {"completion_tokens_details": details} == first["usage"], "they are not billed"
        assert (accepted > 10) == (stack is on and prediction is not wrong)
        assert (rejected > 0) == (stack is on and prediction is wrong)
    assert "accepted_prediction_tokens" not in first["usage"]["completion_tokens_details"]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    for bad, field in (
        ({"type": "text", "content": "x"}, ".type"),
        ({"type": "content"}, ".content"),
        *(({"type": "content", "content": content}, ".content") for content in (None, 5, [], image)),
        ("x", ""),
        ([], ""),
    ):
        await refused(on, "chat/completions", chat(prediction=bad), f"prediction{field}")
    await refused(on, "completions", completion(prediction=right), "prediction")
    await chatted(on, max_tokens=2, prediction=None)
    await chatted(on, max_tokens=2, prediction={"type": "content", "content": ""})
    await canary(on)


async def test_no_more_guesses_are_accepted_than_the_answer_has_tokens(stacks: tuple[Stack, Stack]) -> None:
    """However early a stop token stands in what was predicted in full."""
    letters = {str(token): 100 for token in range(70, 90)}
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "logit_bias": letters, "ignore_eos": True}
    text = (await chatted(stacks[0], **fields))["choices"][0]["message"]["content"]
    prediction, most = {"type": "content", "content": text}, 0
    for letter in sorted(set(text[1:]) - set(text[:1])):
        body = await chatted(stacks[1], **fields, prediction=prediction, stop_token_ids=[ord(letter) + 3])
        usage = body["usage"]
        assert (body["choices"][0]["finish_reason"], usage["completion_tokens"]) == ("stop", text.index(letter) + 1)
        accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        assert accepted < usage["completion_tokens"], "the first token comes of the prompt"
        most = max(most, accepted)
    assert most > 1
    await canary(stacks[1])


async def chatted(stack: Stack, **fields: Any) -> dict[str, Any]:
    response = await send(stack, "chat/completions", chat(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_wrong_guesses_are_charged_as_what_they_took(
    stacks: tuple[Stack, Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler hears of the positions that steps computed for an output; the client is billed for its tokens."""
    monkeypatch.setattr("services.decode.outputs.TOLD_S", 1000.0)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "logit_bias": FEW, "ignore_eos": True}
    text = (await chatted(stacks[0], **fields))["choices"][0]["message"]["content"]
    told = []
    for stack in stacks:
        prediction = {"type": "content", "content": text[:3] + "not at all what comes"}
        usage = (await chatted(stack, **fields, prediction=prediction))["usage"]
        assert usage["completion_tokens"] == 24
        worker = backend(stack).workers[0]
        async with asyncio.timeout(30):
            while not (ended := worker.book.ended.told((), worker.shell.clock())):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        told.append(ended[-1].num_tokens)
    wrong = (await gauges(stacks[1])).drafted - (await gauges(stacks[1])).accepted
    assert wrong > 0
    assert told == [24, 24 + wrong]


# ------------------------------------------------------------------------------------------ OP-51: the distribution

SAMPLES = 4000
PROMPT = tuple(random_tokens(12, 320, seed=5))
TEMPERATURE, TOP_P = 0.7, 0.9


@pytest.fixture(scope="module")
def peaked(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Its distributions have few likely tokens, so that pairs of tokens can be counted."""
    folder = make_tiny_model(tmp_path_factory.mktemp("peaked"), initializer_range=0.45, num_hidden_layers=1)
    return load_decoder(folder, "float32", "auto", threads=1)


def run(model: Model, folder: Path, samplings: Sequence[SamplingParams], most: int) -> tuple[list[list[int]], Gauges]:
    """An output for each sampling, all of one prompt."""
    groups = layer_groups(model.config, 16, "float32", tile_layout=model.kernels.tile_layout)
    with create_pool(folder, WorkerId("w"), PoolLayout(groups, (256,))) as pool:
        config = BatcherConfig(token_budget=512, max_num_seqs=64, depth=0, most_drafted=most)
        batcher, runner = Batcher(pool.layout, config), ModelRunner(model, pool)
        batcher.step_model = FREE_ROWS
        outputs: list[list[int]] = [[] for _ in samplings]
        waiting, live = list(enumerate(samplings))[::-1], 0
        while waiting or live:
            while waiting and live < 64:
                i, sampling = waiting.pop()
                batcher.reserve(SequenceSpec(str(i), PROMPT, len(PROMPT), sampling))
                live += 1
            plan = batcher.plan()
            assert plan is not None
            for update in batcher.commit(runner.run(plan)):
                outputs[int(update.seq_id)].extend(update.token_ids)
                live -= bool(update.finish)
        return outputs, batcher.gauges()


def sampling_of(seed: int, prediction: Sequence[int] = ()) -> SamplingParams:
    guess = pack_tokens(prediction)
    return SamplingParams(4, TEMPERATURE, TOP_P, seed=seed, ignore_eos=True, prediction=guess)


def test_op51_the_distribution_is_the_targets(peaked: Model, tmp_path: Path) -> None:
    """Each sample is even the same token for token, as rows draw with the noise of their positions, guessed or not.

    Outputs of four tokens instead of two: nothing is guessed where one token is left to draw.
    """
    plain, _ = run(peaked, tmp_path, [sampling_of(seed) for seed in range(SAMPLES)], 0)
    likely = Counter(tuple(output) for output in plain).most_common(1)[0][0]
    never = next(token for token in range(3, 320) if all(token not in output for output in plain))
    for guess, samples in ((likely, SAMPLES), ((likely[0], never, never, never), 1000)):
        speculated, counts = run(peaked, tmp_path, [sampling_of(seed, guess) for seed in range(samples)], 4)
        assert speculated == plain[:samples]
        assert counts.drafted > samples // 20
        assert counts.accepted > samples // 20 if guess == likely else counts.accepted == 0
    expected = pair_probabilities(peaked, tmp_path)
    pairs = Counter((output[0], output[1]) for output in plain)
    assert pairs.keys() <= expected.keys(), "a token outside the top-p set"
    # pairs too rare to count by themselves are one bin
    rare = [pair for pair, share in expected.items() if share * SAMPLES < 5]
    bins = [(pairs[pair], share * SAMPLES) for pair, share in expected.items() if share * SAMPLES >= 5]
    bins.append((sum(pairs[pair] for pair in rare), sum(expected[pair] for pair in rare) * SAMPLES))
    assert len(bins) > 10
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins if wanted)
    assert statistic < chi_square_limit(len(bins) - 1), "p < 0.001"


def pair_probabilities(model: Model, folder: Path) -> dict[tuple[int, int], float]:
    """Of the first two tokens, by their logits."""
    logits = dict[int, Tensor]()
    groups = layer_groups(model.config, 16, "float32", tile_layout=model.kernels.tile_layout)
    with create_pool(folder, WorkerId("w"), PoolLayout(groups, (16,))) as pool:
        runner = ModelRunner(model, pool, lambda seq_id, position, row: logits.update({int(seq_id): row.clone()}))

        def distribution(step: int, token_ids: tuple[int, ...]) -> dict[int, float]:
            greedy = SamplingParams(1, temperature=0.0)
            runner.run(StepPlan(step, (ScheduledSequence(str(step), 0, token_ids, ((0, 1),), 1, greedy),)))
            return nucleus(logits[step])

        first = distribution(1, PROMPT)
        pairs = {}
        for step, (token, share) in enumerate(first.items(), start=2):
            for other, more in distribution(step, (*PROMPT, token)).items():
                pairs[token, other] = share * more
        return pairs


def nucleus(logits: Tensor) -> dict[int, float]:
    """The probabilities of the smallest set of likeliest tokens that has TOP_P of all."""
    shares, ids = torch.softmax(logits.double() / TEMPERATURE, 0).sort(descending=True, stable=True)
    count = int((shares.cumsum(0) < TOP_P).sum()) + 1
    kept = shares[:count] / shares[:count].sum()
    return dict(zip(ids[:count].tolist(), kept.tolist(), strict=True))


def chi_square_limit(degrees: int) -> float:
    """The 99.9 % quantile of chi-square, as Wilson and Hilferty approximate it. The draws are fixed: no flake."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.0902 * math.sqrt(part)) ** 3
