"""The requests of the OpenAI API that Baton reads, as strict types.

The written rule: a parameter works, or is refused with a 400 that names it.

- Types are strict: `"5"` is not an integer, nor is `true`; NaN and infinities are refused.
- A known OpenAI parameter that is not supported is accepted only with a value that changes nothing (`NEUTRAL`).
- An unknown field is refused. `user`, `safety_identifier`, `prompt_cache_key`, `metadata` and `store: false` are
  accepted: they describe.

Extensions beside OpenAI's fields are in `EXTENSIONS`. What it does not know: tokens, tenants, the model's context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, PrivateAttr

from shared.contracts.errors import InvalidInput
from shared.ingress.chat_message import ChatMessage
from shared.ingress.metadata import Metadata
from shared.ingress.prediction import Prediction
from shared.ingress.structure_schema import ResponseFormat, StructuredOutputs
from shared.ingress.tool_schema import Strict, Tool, ToolChoice, check_tools, encodable

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
"""Outputs of a request, over all its prompts."""
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 1e-9
"""A logit divided by a smaller one may be no number any more."""
MAX_BIASES = 1024
MAX_STOP_IDS = 64
MAX_IDENTIFIER_CHARS = 64
"""Of what a client calls its user or its conversation by."""
Identifier = Annotated[str, Field(max_length=MAX_IDENTIFIER_CHARS)]
MAX_SALT_CHARS = 256
CacheSalt = Annotated[str, Field(max_length=MAX_SALT_CHARS), AfterValidator(encodable)]

CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None,),
    "store": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Known parameters of chat completions without support, with the values that ask for nothing."""

COMPLETIONS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (None, False),
    "suffix": (None, ""),
}
"""The same for completions."""

MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
}
"""The same for the fields of a message; an assistant's own message may be sent back as the client library got it."""


def drop_neutral(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> dict[str, Any]:
    """`body` without the unsupported parameters whose values ask for nothing.

    Raises InvalidInput naming the first one that asks for something.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name not in neutral:
            kept[name] = value
        elif not any(_same(value, harmless) for harmless in neutral[name]):
            raise InvalidInput(f"{where}{name} is not supported with this value", param=f"{where}{name}")
    return kept


def _same(value: Any, harmless: Any) -> bool:
    # False == 0 and True == 1, but not here
    return isinstance(value, bool) == isinstance(harmless, bool) and bool(value == harmless)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must hold at most {MAX_STOPS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(encodable(stop) for stop in stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    several = isinstance(value, list) and any(isinstance(item, str | list) for item in value)
    if several and len({type(item) for item in value}) > 1:
        raise ValueError("must hold either strings or lists of token ids")
    if several and len(value) > MAX_CHOICES:
        raise ValueError(f"must hold at most {MAX_CHOICES} prompts")
    return tuple(_prompt(item) for item in value) if several else (_prompt(value),)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be empty")
        return encodable(value)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of token ids")
    if not value:
        raise ValueError("must not be empty")
    return _token_ids(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("token ids must be integers, 0 or more")
    return tuple(value)


def _stop_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else _token_ids(value)
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(f"must hold at most {MAX_STOP_IDS} token ids")
    return tuple(dict.fromkeys(ids))


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must be an object of at most {MAX_BIASES} token ids")
    for key, bias in value.items():
        # "01" beside "1" would be the same token twice
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key))):
            raise ValueError("keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("values must be numbers from -100 to 100")
    return tuple(sorted((int(key), float(bias)) for key, bias in value.items()))


def _or_zero(value: Any) -> Any:
    return 0 if value is None else value


# what the fields take, for the API's description: their validators read more forms than the one that is kept
_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_StopForm = _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS)] | None
_TokenId = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
_StopIdsForm = Annotated[list[_TokenId], Field(max_length=MAX_STOP_IDS)] | None
_BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
_BiasForm = Annotated[dict[_BiasKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[_TokenId], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_CHOICES)
_PromptForm = _Text | _Ids | Annotated[list[_Text], _Several] | Annotated[list[_Ids], _Several]


class StreamOptions(Strict):
    """`include_usage`: one more chunk with the usage, before `[DONE]`.

    `continuous_usage_stats`, an extension: all others have it too, as it is then.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Generation(Strict):
    model: str = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=_StopForm)] = ()
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_bias, json_schema_input_type=_BiasForm)] = ()
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=10)
    min_tokens: Annotated[_Count, BeforeValidator(_or_zero, json_schema_input_type=_Count | None)] = 0
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_stop_ids, json_schema_input_type=_StopIdsForm)] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    timings: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    safety_identifier: Identifier | None = None
    metadata: Metadata = None
    cache_salt: CacheSalt | None = None

    @property
    def output_limit(self) -> int | None:
        """Output tokens asked for; None when the request names no limit."""
        return self.max_tokens

    @property
    def choices(self) -> int:
        """Outputs wanted of each prompt."""
        return self.n or 1

    @property
    def bias_ids(self) -> tuple[int, ...]:
        """Token ids that `logit_bias` names."""
        return tuple(token_id for token_id, _ in self.logit_bias)


def _not_empty(messages: list[ChatMessage]) -> list[ChatMessage]:
    if not messages:
        raise ValueError("must hold at least one message")
    return messages


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), AfterValidator(_not_empty)]
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool] | None, AfterValidator(check_tools)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: Identifier | None = None
    prediction: Prediction | None = None
    _predicted_ids: tuple[int, ...] = PrivateAttr(())

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def predicted_ids(self) -> tuple[int, ...]:
        """The tokens of `prediction`, once they are known."""
        return self._predicted_ids

    def know_prediction(self, token_ids: Iterable[int]) -> None:
        """Keep the tokens of `prediction` beside it."""
        self._predicted_ids = tuple(token_ids)

    @property
    def wanted_logprobs(self) -> int:
        """Most likely tokens wanted beside each; -1: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(_Generation):
    """POST /v1/completions. Prompts: each text, or token ids."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts, json_schema_input_type=_PromptForm)]
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def predicted_ids(self) -> tuple[int, ...]:
        """A completion comes without a prediction."""
        return ()

    @property
    def wanted_logprobs(self) -> int:
        """Most likely tokens wanted beside each; -1: no log-probabilities."""
        return -1 if self.logprobs is None else self.logprobs


GenerationRequest = ChatRequest | CompletionRequest

EXTENSIONS = frozenset(
    {
        "cache_salt",
        "ignore_eos",
        "include_stop_str_in_output",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "stop_token_ids",
        "structured_outputs",
        "timings",
        "top_k",
    }
)
"""Fields of both requests that are not OpenAI's."""
