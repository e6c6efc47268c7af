"""The official OpenAI client, unchanged, against the whole stack with the default model."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.stack.running import MODEL, OTHER_KEY, Baton

pytestmark = pytest.mark.model

QUESTION = "Name three rivers of Europe."
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
CONTEXT = 8192


@dataclass
class Answer:
    """What a client saw of one request."""

    text: str = ""
    finish: str | None = None
    usage: Any = None
    pieces: list[str] = field(default_factory=list)


def chat(client: OpenAI, prompt: str, *, stream: bool = False, **options: Any) -> Answer:
    messages: Any = [{"role": "user", "content": prompt}]
    if not stream:
        whole = client.chat.completions.create(model=MODEL, messages=messages, **options)
        return Answer(whole.choices[0].message.content or "", whole.choices[0].finish_reason, whole.usage)
    answer = Answer()
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options):
        for choice in chunk.choices:
            answer.pieces += [choice.delta.content] if choice.delta.content else []
            answer.finish = choice.finish_reason or answer.finish
        answer.usage = chunk.usage or answer.usage
    answer.text = "".join(answer.pieces)
    return answer


def complete(client: OpenAI, prompt: str, *, stream: bool = False, **options: Any) -> Answer:
    if not stream:
        whole = client.completions.create(model=MODEL, prompt=prompt, **options)
        return Answer(whole.choices[0].text, whole.choices[0].finish_reason, whole.usage)
    answer = Answer()
    for chunk in client.completions.create(model=MODEL, prompt=prompt, stream=True, **options):
        for choice in chunk.choices:
            answer.pieces += [choice.text] if choice.text else []
            answer.finish = choice.finish_reason or answer.finish
        answer.usage = chunk.usage or answer.usage
    answer.text = "".join(answer.pieces)
    return answer


def together(calls: list[Callable[[], Answer]]) -> list[Answer]:
    """The answers to requests sent at once."""
    with ThreadPoolExecutor(16) as pool:
        return [running.result() for running in [pool.submit(call) for call in calls]]


@pytest.fixture
def client(stack: Baton) -> OpenAI:
    return stack.openai()


def test_the_models_there_are(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_max_tokens_usage_and_finish_streamed_and_not(client: OpenAI) -> None:
    # When the same is asked in all four forms, with and without usage
    whole, streamed, plain, completed = together(
        [
            lambda: chat(client, QUESTION, max_tokens=7, **GREEDY),
            lambda: chat(client, QUESTION, max_tokens=7, stream=True, stream_options={"include_usage": True}, **GREEDY),
            lambda: chat(client, QUESTION, max_completion_tokens=7, stream=True, **GREEDY),
            lambda: complete(client, QUESTION, max_tokens=7, **GREEDY),
        ]
    )
    # Then all end at the limit, the streams say the same, and usage comes where it was asked for
    assert {answer.finish for answer in (whole, streamed, plain, completed)} == {"length"}
    assert whole.text == streamed.text == plain.text
    assert len(streamed.pieces) > 1
    assert whole.usage.completion_tokens == completed.usage.completion_tokens == 7
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 7
    assert streamed.usage == whole.usage
    assert plain.usage is None


def test_an_answer_ends_by_itself(client: OpenAI) -> None:
    answer = chat(client, "Say only the word yes.", max_tokens=120, **GREEDY)
    assert answer.finish == "stop"
    assert 0 < answer.usage.completion_tokens < 120
    assert "<|" not in answer.text


def test_a_seed_repeats_an_answer_and_another_changes_it(client: OpenAI) -> None:
    one, again, streamed, other, free, free_again = (
        answer.text
        for answer in together(
            [
                lambda: chat(client, QUESTION, max_tokens=20, **SEEDED),
                lambda: chat(client, QUESTION, max_tokens=20, **SEEDED),
                lambda: chat(client, QUESTION, max_tokens=20, stream=True, **SEEDED),
                lambda: chat(client, QUESTION, max_tokens=20, **SEEDED | {"seed": 12}),
                lambda: chat(client, QUESTION, max_tokens=20, temperature=1.5),
                lambda: chat(client, QUESTION, max_tokens=20, temperature=1.5),
            ]
        )
    )
    assert one == again == streamed
    assert other != one
    assert free != free_again


def test_stop_strings_cut_the_text_before_them(client: OpenAI) -> None:
    # Given an answer, and a stop string from its middle that begins and ends inside words
    whole = chat(client, QUESTION, max_tokens=24, **GREEDY)
    stop = whole.text[21:27]
    expected = whole.text[: whole.text.index(stop)]
    # When it is asked for again with that string, alone or among others
    answers = together(
        [
            lambda: chat(client, QUESTION, max_tokens=24, stop=stop, **GREEDY),
            lambda: chat(client, QUESTION, max_tokens=24, stop=["never there", stop], stream=True, **GREEDY),
        ]
    )
    # Then the text ends before it, and what follows is not paid for
    for answer in answers:
        assert (answer.text, answer.finish) == (expected, "stop")
    assert answers[0].usage.completion_tokens < whole.usage.completion_tokens


SCRIPTS = {
    "emoji": "😀🎉👩‍👩‍👧😀🎉👩‍👩‍👧😀🎉👩‍👩‍👧😀",
    "cjk": "日本語中文한국어日本語中文한국어日本語",
    "combining": "é ñ ạ̈ é ñ ạ̈ é ñ",
}


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streamed_text_is_the_text_for_every_script(client: OpenAI, options: dict[str, Any]) -> None:
    # When each prompt is asked whole and streamed, as completion and as chat, all at once
    more = options | {"max_tokens": 16}
    ways = (complete, chat)
    calls = [(way, text, stream) for way in ways for text in SCRIPTS.values() for stream in (False, True)]
    answers = together([lambda c=call: c[0](client, c[1], stream=c[2], **more) for call in calls])  # type: ignore[misc]
    # Then both say the same, and no piece holds a broken character that the whole does not
    for whole, streamed in zip(answers[::2], answers[1::2], strict=True):
        assert streamed.text == whole.text
        assert sum(piece.count("\ufffd") for piece in streamed.pieces) == whole.text.count("\ufffd")
    # And each script was really there: a greedy completion goes on in it
    if options is GREEDY:
        assert all(not answer.text.isascii() for answer in answers[: 2 * len(SCRIPTS)])


@dataclass(frozen=True)
class Bad:
    """A request that must be refused: (status, code, param) expected."""

    status: int
    code: str | None
    param: str | None
    body: bytes | dict[str, Any] | None = None
    path: str = "chat/completions"
    method: str = "POST"
    key: str | None = ""


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1} | changes


def completion_body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 1} | changes


LONG = "word " * (CONTEXT + 10)
BAD = {
    "unknown model": Bad(404, "model_not_found", "model", chat_body(model="gpt-4")),
    "no model": Bad(400, "missing_required_parameter", "model", {"messages": []}),
    "malformed JSON": Bad(400, "invalid_json", None, b'{"model": "smollm2'),
    "not an object": Bad(400, "invalid_json", None, b"[1, 2]"),
    "not UTF-8": Bad(400, "invalid_json", None, b'{"model": "\xff\xfe"}'),
    "nested deeply": Bad(400, "invalid_json", None, b"[" * 100_000),
    "half a surrogate": Bad(
        400, "invalid_value", "messages.0.content", b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}'
    ),
    "empty body": Bad(400, "invalid_json", None, b""),
    "empty messages": Bad(400, "invalid_value", "messages", chat_body(messages=[])),
    "unknown role": Bad(
        400, "invalid_value", "messages.0.role", chat_body(messages=[{"role": "wizard", "content": "x"}])
    ),
    "prompt over the context": Bad(
        400, "context_length_exceeded", "messages", chat_body(messages=[{"role": "user", "content": LONG}])
    ),
    "token prompt over the context": Bad(
        400, "context_length_exceeded", "prompt", completion_body(prompt=[5] * CONTEXT), "completions"
    ),
    "output over the context": Bad(400, "context_length_exceeded", "messages", chat_body(max_tokens=CONTEXT)),
    "no output": Bad(400, "invalid_value", "max_tokens", chat_body(max_tokens=0)),
    "empty prompt": Bad(400, "invalid_value", "prompt", completion_body(prompt=""), "completions"),
    "unknown token": Bad(400, "invalid_value", "prompt", completion_body(prompt=[10**9]), "completions"),
    "temperature as text": Bad(400, "invalid_value", "temperature", chat_body(temperature="hot")),
    "temperature too high": Bad(400, "invalid_value", "temperature", chat_body(temperature=9)),
    "temperature not a number": Bad(
        400,
        "invalid_value",
        "temperature",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    ),
    "too many stops": Bad(400, "invalid_value", "stop", chat_body(stop=list("abcde"))),
    "unknown field": Bad(400, "unknown_parameter", "colour", chat_body(colour="red")),
    "too many choices": Bad(400, "invalid_value", "n", chat_body(n=129)),
    "usage without stream": Bad(
        400, "invalid_value", "stream_options", chat_body(stream_options={"include_usage": True})
    ),
    "no key": Bad(401, "invalid_api_key", None, chat_body(), key=None),
    "wrong key": Bad(401, "invalid_api_key", None, chat_body(), key="sk-baton-wrong"),
    "wrong method": Bad(405, "method_not_allowed", None, method="GET"),
    "unknown path": Bad(404, "unknown_url", None, chat_body(), "responses/nothing/more"),
    "huge body": Bad(413, "request_too_large", None, b" " * (17 * 1024 * 1024)),
    "not an admin": Bad(403, "forbidden", None, None, "../baton/cluster", "GET", OTHER_KEY),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_in_openais_shape(stack: Baton, bad: Bad) -> None:
    # When something is sent that cannot be run
    assert stack.record is not None
    headers = {} if bad.key is None else {"authorization": f"Bearer {bad.key or stack.record.api_key}"}
    content = json.dumps(bad.body).encode() if isinstance(bad.body, dict) else bad.body
    url = httpx.URL(f"{stack.url}/v1/").join(bad.path)
    response = httpx.request(bad.method, url, content=content, headers=headers, timeout=30)
    # Then the answer names what is wrong, in the shape clients know
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (response.status_code, error["code"], error["param"]) == (bad.status, bad.code, bad.param)
    assert error["message"]
    assert error["type"]


def test_the_client_library_raises_what_its_users_expect(stack: Baton) -> None:
    for key, body, error in (
        ("", {"model": "gpt-4"}, openai.NotFoundError),
        ("", {"messages": []}, openai.BadRequestError),
        ("", {"temperature": 9.0}, openai.BadRequestError),
        ("sk-wrong", {}, openai.AuthenticationError),
    ):
        with pytest.raises(error) as caught:
            stack.openai(key).chat.completions.create(**chat_body(**body))
        assert caught.value.status_code < 500
    # And a canary works: nothing of all this harmed the stack
    assert stack.answers()
