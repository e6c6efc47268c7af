"""OP-40 to OP-44: KV is reused for the same tokens of the same tenant under the same weights, or not at all.

One stack of two real workers for all of them. `cold` answers are computed by a worker that may use nothing it has.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names
from tests.conformance.cached_stack import BLOCK, BRIEF_KEY, MODEL, Answer, CachedStack, answer_of, body
from tests.stack.running import OTHER_KEY, until
from tests.stack.streams import kill, pid_of

pytestmark = pytest.mark.timeout(300)

ROUNDS = 10


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedStack]:
    found = CachedStack(tmp_path_factory.mktemp("cached"))
    try:
        found.up()
        yield found
        found.baton.down()
    finally:
        found.baton.kill_all()


def tokens(seed: int, count: int) -> list[int]:
    """Ids below 200, so that one may be moved by a few and is still a token."""
    return [random.Random(f"{seed}/{i}").randrange(3, 200) for i in range(count)]


def test_op40_weights_replaced_under_the_same_name(stack: CachedStack) -> None:
    # Given a prompt of ten blocks that is warm under the first weights, for two tenants
    prompt = tokens(40, 10 * BLOCK + 1)
    first = {key: stack.warm(prompt, 10 * BLOCK, key) for key in ("", OTHER_KEY)}
    assert stack.warm(prompt, 10 * BLOCK, cache_salt="visitor").said == first[""].said
    before = stack.workers()
    # When others take their place, worker by worker, while a client goes on asking
    with asking(stack, prompt) as told:
        stack.replace_weights(seed=1)
    until(lambda: len(now := stack.workers()) == 2 and not set(now) & set(before), 30, stack.workers)
    # Then nothing of the first is known any more, but what that client had computed since
    until(lambda: stack.indexed() <= 10, 30, stack.indexed)
    # And each tenant is answered as by a server that never had others
    for key, old in first.items():
        new = stack.ask(prompt, key)
        assert new.cached == 0
        assert new.said == stack.cold(prompt, key).said
        assert new.text != old.text
        assert stack.warm(prompt, 10 * BLOCK, key).said == new.said
    # And what was said meanwhile was of the one or of the others, never of both
    texts = {first[""].text, stack.ask(prompt).text}
    assert told
    assert set(told) <= texts


@contextmanager
def asking(stack: CachedStack, prompt: list[int]) -> Iterator[list[str]]:
    """What a client is told that asks again and again under a salt of its own, its failures included."""
    told: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            response = stack.post(prompt=prompt, cache_salt="visitor")
            told.append(answer_of(response.json()).text if response.status_code == 200 else response.text)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield told
    finally:
        over.set()
        client.join(60)


def test_op41_a_salt_of_the_clients_choosing_meets_no_other_namespace(stack: CachedStack) -> None:
    # Given a prompt that tenant A has warm, unsalted and under salts of its own
    prompt = tokens(41, 4 * BLOCK + 1)
    expected = stack.cold(prompt).said
    for fields in ({}, {"cache_salt": "demo"}, {"cache_salt": ""}):
        assert stack.warm(prompt, 4 * BLOCK, **fields).said == expected
    # When B sends it, with any field that might name A
    namespaces = ("demo", "other", MODEL, "", "demo/", "default", "\0demo", "index.scope-key/demo")
    given: list[dict[str, object]] = [{"cache_salt": text} for text in namespaces]
    given += [{"user": text} for text in namespaces]
    given += [{"safety_identifier": "demo"}, {"metadata": {"tenant": "demo", "cache_salt": "demo"}}]
    for number, fields in enumerate(given):
        # what B itself sent unsalted is B's own to find
        own = 0 if "cache_salt" in fields or number == len(namespaces) else 4 * BLOCK
        answer = stack.ask(prompt, OTHER_KEY, **fields)
        # Then it hits nothing of A's, and is told what it would be told cold
        assert answer.cached in (0, own)
        assert answer.said == expected
    # And what cannot be a salt, or is no field, is refused by name
    for wrong in ("a" * (1 << 20), "a" * 257, 5, ["demo"], {"tenant": "demo"}):
        response = stack.post(OTHER_KEY, prompt=prompt, cache_salt=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")
    for field in ("tenant", "scope", "salt", "kv_transfer_params", "lora", "adapter"):
        response = stack.post(OTHER_KEY, prompt=prompt, **{field: "demo"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert stack.ask(prompt[:4], OTHER_KEY, max_tokens=4).cached == 0


def test_op41_salts_are_the_same_namespace_at_every_door(stack: CachedStack) -> None:
    # Given a chat that is warm under a salt
    question = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    messages = [{"role": "user", "content": "hi user " * 12}]

    def chat(salt: str) -> int:
        asked = {**question, "messages": messages, "cache_salt": salt}
        usage = post(stack, "chat/completions", asked).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def respond(salt: str) -> int:
        asked = {"model": MODEL, "max_output_tokens": 4, "temperature": 0, "input": messages, "cache_salt": salt}
        return int(post(stack, "responses", asked).json()["usage"]["input_tokens_details"]["cached_tokens"])

    cached = until(lambda: chat("mine"), 30)
    # Then it is found under the same salt by another door, and under no other salt by any
    assert respond("mine") == cached
    assert (chat("yours"), respond("theirs"), respond("")) == (0, 0, 0)
    answer = post(stack, "messages", {"model": MODEL, "max_tokens": 4, "messages": messages, "cache_salt": "mine"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_op42_prompts_made_to_collide(stack: CachedStack) -> None:
    # Given a warm prompt of four blocks
    prompt = tokens(42, 4 * BLOCK + 3)
    stack.warm(prompt, 4 * BLOCK)
    blocks = [prompt[i * BLOCK : (i + 1) * BLOCK] for i in range(4)]
    tail = prompt[4 * BLOCK :]

    def moved(at: int, by: int = 31, back: int = 1) -> list[int]:
        """The same by a hash that multiplies by 31 and adds."""
        other = list(prompt)
        other[at], other[at + 1] = other[at] + by, other[at + 1] - back
        return other

    def joined(*order: list[int]) -> list[int]:
        return [*(token for block in order for token in block), *tail]

    foreign = tokens(421, BLOCK)
    stack.warm(joined(foreign, *blocks[:3]), 4 * BLOCK)
    # When others ask for what a weak hash takes for the same
    cases = {
        "first block moved": (moved(3), 0),
        "third block moved": (moved(2 * BLOCK + 5), 2),
        "two tokens swapped": (swapped(prompt, BLOCK + 1, BLOCK + 2), 1),
        "sum kept": (moved(3 * BLOCK + 7, 1, 1), 3),
        "blocks swapped": (joined(blocks[1], blocks[0], *blocks[2:]), 0),
        "later blocks swapped": (joined(*blocks[:2], blocks[3], blocks[2]), 2),
        "same block behind another parent": (joined(tokens(422, BLOCK), *blocks[1:]), 0),
        "same block after a repetition": (joined(blocks[0], blocks[0], *blocks[1:3]), 1),
        "behind a block of another chain": (joined(foreign, blocks[0], blocks[2], blocks[3]), 2),
        "moved by one position": ([tokens(423, 1)[0], *prompt[:-1]], 0),
    }
    for what, (other, common) in cases.items():
        # Then only the blocks that are truly common are reused, and the answer is the cold one
        answer = stack.ask(other)
        assert answer.cached <= common * BLOCK, what
        assert answer.said == stack.cold(other).said, what
        assert stack.warm(other, len(other) // BLOCK * BLOCK).said == answer.said, what


def swapped(prompt: list[int], left: int, right: int) -> list[int]:
    other = list(prompt)
    other[left], other[right] = other[right], other[left]
    return other


def test_op43_a_hit_on_the_whole_prompt(stack: CachedStack) -> None:
    for count in (1, 2, 4):
        for length in (count * BLOCK - 1, count * BLOCK, count * BLOCK + 1):
            # When a prompt of whole blocks, or of one token more or less, comes again and again
            prompt = tokens(1000 * count + length, length)
            first = stack.ask(prompt)
            most = (length - 1) // BLOCK * BLOCK
            again = [stack.warm(prompt, most), stack.ask(prompt)]
            # Then the last token is computed each time, once, and every answer is the first one
            assert first.cached == 0
            for answer in again:
                assert answer.cached <= length - 1
                assert answer.cached % BLOCK == 0
                assert answer.said == first.said
    # And nothing is held for it
    stack.baton.wait_idle()


def test_kv_is_kept_as_long_as_its_tenants_record_says(stack: CachedStack) -> None:
    # Given a prompt that is warm for a tenant whose KV is kept for seconds, and for one without a limit
    prompt = tokens(45, 4 * BLOCK + 1)
    warm = stack.warm(prompt, 4 * BLOCK)
    others = stack.indexed()
    brief = stack.warm(prompt, 4 * BLOCK, BRIEF_KEY)
    # When nobody asks for so long
    until(lambda: stack.indexed() <= others, 30, stack.indexed)
    # Then it is gone for the one, and computed anew to the same answer
    again = stack.ask(prompt, BRIEF_KEY)
    assert again.cached == 0
    assert again.said == brief.said == warm.said
    assert stack.warm(prompt, 4 * BLOCK).said == warm.said
    until(lambda: stack.indexed() <= others, 30, stack.indexed)


def test_op44_the_index_does_not_outlive_a_workers_cache(stack: CachedStack) -> None:
    # Given a long prefix that one worker holds
    prefix, warm = held_by_one(stack)
    home, known = stack.worker_of(warm), stack.indexed()
    # When it is restarted in place
    kill(stack.baton, pid_of(stack.baton, home))
    # Then the index knows nothing of it within seconds
    until(lambda: home not in stack.workers() and stack.indexed() <= known - 8, 60, stack.indexed)
    until(lambda: len(stack.workers()) == 2 and stack.baton.answers(), 60, stack.workers)
    first = stack.ask([*prefix, 5])
    assert first.cached == 0
    assert stack.span(first, "index.match")[a.REASON] == "nothing_held"
    hits = stack.total(names.PREFIX_HITS, "decode")
    # And with other load, what answers tell is what workers really reused, and no worker does it all
    served: set[str] = set()
    told = 0
    for _ in range(ROUNDS):
        answers = asyncio.run(crowd(stack, prefix))
        told += sum(answer.cached for answer in answers)
        for answer in answers:
            assert answer.said == warm.said
            assert stack.span(answer, "decode.reserve")[a.CACHED_TOKENS] == answer.cached
            served.add(stack.worker_of(answer))
        if len(served) == 2:
            break
    assert stack.total(names.PREFIX_HITS, "decode") - hits == told
    assert len(served) == 2
    assert stack.warm(prefix, 8 * BLOCK).said == warm.said


def held_by_one(stack: CachedStack) -> tuple[list[int], Answer]:
    """A prefix of eight blocks that only one worker was asked for, and what it said when it was warm."""
    for seed in range(44, 60):
        prefix, answers = tokens(100 * seed, 8 * BLOCK + 1), list[Answer]()

        def warm(prefix: list[int] = prefix, answers: list[Answer] = answers) -> bool:
            answers.append(stack.ask(prefix))
            return answers[-1].cached == 8 * BLOCK

        until(warm, 30)
        if len({stack.worker_of(answer) for answer in answers}) == 1:
            return prefix, answers[-1]
    raise AssertionError("no prefix stays at one worker")


async def crowd(stack: CachedStack, prefix: list[int]) -> list[Answer]:
    """Twenty requests of the prefix at once."""
    async with stack.client() as client:
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body(prompt=prefix)) for _ in range(20)))
    assert [response.status_code for response in responses] == [200] * 20
    return [answer_of(response.json()) for response in responses]


def post(stack: CachedStack, door: str, asked: dict[str, object]) -> httpx.Response:
    assert stack.baton.record is not None
    headers = {"Authorization": f"Bearer {stack.baton.record.api_key}"}
    return httpx.post(f"{stack.baton.url}/v1/{door}", json=asked, headers=headers, timeout=60)
