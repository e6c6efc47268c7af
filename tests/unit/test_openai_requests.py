"""Request bodies: every parameter works or is refused by a 400 that names it."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.contracts.errors import ContextExceeded, InvalidInput
from shared.contracts.grants import Limits
from shared.contracts.ids import TenantId
from shared.contracts.messages import Identity
from shared.ingress.openai_schema import ChatRequest, CompletionRequest
from shared.ingress.parse import parse_chat, parse_completion
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.request_plan import make_plan
from shared.ingress.served_models import ServedModel
from shared.ingress.structure import Structure
from shared.model.generation import SamplingDefaults

USER = {"role": "user", "content": "hi"}
IDENTITY = Identity(tenant=TenantId("t"), key_id="k", default_max_tokens=100)


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refused(parse: Any, **fields: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        parse(**fields)
    return caught.value


def test_everything_supported_is_read() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=-1,
        stop=["a", "b"],
        max_completion_tokens=7,
        user="u",
        metadata={"a": "b"},
        store=False,
    )
    assert request.temperature == 0.0
    assert request.stop == ("a", "b")
    assert request.output_limit == 7
    assert completion(stop="x").stop == ("x",)


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"logprobs": False},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"temperature": None},
        {"stop": None},
        {"top_logprobs": None},
        {"service_tier": "auto"},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(neutral: dict[str, Any]) -> None:
    chat(**neutral)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "2"),
        ("n", True),
        ("n", 0),
        ("n", 129),
        ("presence_penalty", 2.1),
        ("presence_penalty", False),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"٥": 1}),
        ("logit_bias", [5]),
        ("logprobs", 5),
        ("min_tokens", -1),
        ("min_tokens", True),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", list(range(65))),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("service_tier", "scale"),
        ("timings", 1),
        ("top_logprobs", 3),
        ("tools", "f"),
        ("response_format", "xml"),
        ("store", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("presence_penalty", float("nan")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", "7"),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("max_tokens", 2**40),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 5),
        ("stop", [1]),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("model", 3),
        ("model", ""),
        ("user", 3),
        ("temprature", 1),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
    ],
)
def test_what_does_not_work_is_refused_by_name(field: str, value: Any) -> None:
    assert refused(chat, **{field: value}).param == field


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages.0.content"),
        ({"role": "wizard", "content": "hi"}, "messages.0.role"),
        ({"role": "tool", "content": "hi"}, "messages.0.tool_call_id"),
        ({"role": "user", "content": "hi", "tool_call_id": "x"}, "messages.0.tool_call_id"),
        ({"role": "user", "content": "hi", "name": "Bob"}, "messages.0.name"),
        ({"role": "assistant", "content": "hi", "tool_calls": [{}]}, "messages.0.tool_calls.0.id"),
        ("hi", "messages.0"),
    ],
)
def test_bad_messages_are_refused_by_place(message: Any, param: str) -> None:
    assert refused(chat, messages=[message]).param == param


def test_an_assistants_call_may_come_back_as_the_client_library_got_it() -> None:
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    call = {"id": "x", "type": "function", "index": 0, "function": function}
    request = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call], "parsed": None}])
    (made,) = request.messages[1].tool_calls or ()
    assert (made.id, made.function.name, made.function.arguments) == ("x", "f", '{"a": 1}')
    with pytest.raises(InvalidInput, match="parsed"):
        chat(messages=[{"role": "user", "content": "hi", "parsed": None}])


def test_an_assistants_message_may_come_back_as_the_client_library_got_it() -> None:
    chat(
        messages=[{"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}, USER]
    )


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["ok", ""], [-1], [1.5], [True], ["a"] * 129, ["a", [1]], None, 5, {}, [None], [1, "a"]],
)
def test_bad_prompts(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


def test_prompts_that_work() -> None:
    assert completion(prompt="a").prompt == completion(prompt=["a"]).prompt == ("a",)
    assert completion(prompt=[1, 2, 3]).prompt == ((1, 2, 3),)
    assert completion(prompt=[[4]]).prompt == ((4,),)
    assert completion(prompt=[[1, 2], [3]]).prompt == ((1, 2), (3,))
    assert completion(prompt=["a", "b"]).prompt == ("a", "b")


def test_what_goes_together() -> None:
    assert refused(chat, logprobs=False, top_logprobs=3).param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=3).wanted_logprobs == 3
    assert (chat(logprobs=True).wanted_logprobs, chat().wanted_logprobs) == (0, -1)
    assert (completion(logprobs=0).wanted_logprobs, completion().wanted_logprobs) == (0, -1)
    assert completion(n=2, best_of=2).choices == 2
    assert refused(completion, prompt=["a"] * 3, n=43).param == "n"
    assert refused(chat, timings=True, stream=True).param == "timings"
    assert chat(timings=True, stream=True, stream_options={"include_usage": True}).timings
    assert chat(logit_bias={"7": 1, "3": -0.5}).logit_bias == ((3, -0.5), (7, 1.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("best_of", 3), ("n", 0), ("echo", 1), ("suffix", "x"), ("logprobs", True), ("logprobs", 21), ("messages", [])],
)
def test_completions_refuse_by_name(field: str, value: Any) -> None:
    assert refused(completion, **{field: value}).param == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"model":"\xed\xa0\xbd"}',
        b'{"a":1}}',
        b"[" * 100_000,
        b'{"model":' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"model":"m"}',
    ],
)
def test_what_is_not_a_json_object(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_chat(body)


@pytest.mark.parametrize(
    "raw",
    [
        '{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
        '{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\\ude00"}]}]}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"stop":"\\ud83d"}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"user":"\\ud83d"}',
        '{"model":"\\ud83d","messages":[{"role":"user","content":"x"}]}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":{"\\ud83d":"x"}}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"\\ud83d":1}',
    ],
)
def test_half_of_a_surrogate_pair_is_refused_and_the_error_can_be_encoded(raw: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_chat(raw.encode())
    (caught.value.message + caught.value.param).encode()


def test_the_full_pair_works() -> None:
    body = '{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
    assert parse_chat(body.encode()).messages[0].content == "😀"


def test_errors_do_not_quote_the_input() -> None:
    secret = "whales sing at dawn"
    for fields in ({"temperature": secret}, {"messages": [{"role": secret, "content": "x"}]}, {"stop": [secret, 3]}):
        assert secret not in refused(chat, **fields).message


def test_a_body_full_of_faults_costs_one_error() -> None:
    unknown = {f"k{index}": 1 for index in range(50_000)}
    many = [{} for _ in range(50_000)]
    started = time.process_time()
    assert refused(chat, **unknown).param == "k0"
    assert refused(chat, messages=many).param == "messages.0.role"
    assert refused(chat, metadata=unknown).param == "metadata"
    # an error object for every fault takes several seconds, and a gigabyte for a body at the limit
    assert time.process_time() - started < 1.0


def test_differing_limits_are_refused() -> None:
    assert refused(chat, max_tokens=1, max_completion_tokens=2).param == "max_tokens"
    assert chat(max_tokens=2, max_completion_tokens=2).output_limit == 2


def plan(request: Any, prompt: list[int], identity: Identity = IDENTITY, context: int = 200) -> Any:
    return make_plan(request, prompt, served(context), identity=identity, seed=5)


def served(context: int = 200, **changes: Any) -> ServedModel:
    tokenizer = SimpleNamespace(vocab_size=300)
    codec = cast(PromptCodec, SimpleNamespace(tokenizer=tokenizer, structure=lambda request, prompt: Structure()))
    return ServedModel("tiny-model", "default", context, codec, **changes)


def test_the_plan_fills_in_defaults() -> None:
    made = plan(chat(), [1] * 10)
    assert (made.sampling.max_tokens, made.sampling.temperature, made.sampling.top_p) == (100, 1.0, 1.0)
    assert (made.sampling.top_k, made.sampling.seed, made.kind) == (0, 5, "chat")
    assert plan(completion(), [1] * 150).sampling.max_tokens == 50
    limited = Identity(tenant=TenantId("t"), key_id="k", default_max_tokens=100, limits=Limits(max_output_tokens=20))
    assert plan(completion(), [1], limited).sampling.max_tokens == 20
    assert plan(completion(seed=-1), [1]).sampling.seed == 2**64 - 1


def test_the_models_own_defaults_fill_in_what_a_client_left_out() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.05)
    model = served(defaults=defaults)

    def sampling(**fields: Any) -> tuple[float, float, int, float, float]:
        made = make_plan(chat(**fields), [1], model, identity=IDENTITY, seed=5).sampling
        return made.temperature, made.top_p, made.top_k, made.min_p, made.repetition_penalty

    assert sampling() == (0.6, 0.9, 40, 0.1, 1.05)
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert sampling(**own) == (0.0, 1.0, 0, 0.0, 1.0)
    assert make_plan(completion(), [1], model, identity=IDENTITY, seed=5).model == "tiny-model"


def test_ids_the_model_has_no_embedding_for_are_refused() -> None:
    with pytest.raises(InvalidInput, match="below 250"):
        make_plan(completion(prompt=[250]), [250], served(embeddings=250), identity=IDENTITY, seed=5)


def test_the_context_bounds_prompt_and_output() -> None:
    assert plan(chat(max_tokens=190), [1] * 10).sampling.max_tokens == 190
    for request, count in ((chat(max_tokens=191), 10), (chat(), 200), (completion(max_tokens=1), 201)):
        with pytest.raises(ContextExceeded) as caught:
            plan(request, [1] * count)
        assert caught.value.param in ("messages", "prompt")


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(completion(prompt=[300]), [300])
    assert caught.value.param == "prompt"


def test_a_salt_is_bounded_and_travels_as_a_digest() -> None:
    texts = ("demo", "", "a" * 256, "\u00e9" * 256)
    salts = [plan(completion(cache_salt=text), [1]).salt for text in texts]
    assert [len(salt) for salt in salts] == [16] * 4
    assert len({*salts, plan(completion(), [1]).salt}) == 5
    assert plan(chat(cache_salt="demo"), [1]).salt == salts[0]
    assert plan(completion(cache_salt=None), [1]).salt == b""
    for wrong in ("a" * 257, "a" * (1 << 20), 5, ["demo"], "\ud800"):
        assert refused(completion, cache_salt=wrong).param == "cache_salt"
