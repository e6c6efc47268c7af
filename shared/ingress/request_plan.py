"""What a checked request asks for, in the engine's terms. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from shared.contracts.errors import ContextExceeded, InvalidInput
from shared.contracts.grants import SALT_BYTES
from shared.contracts.messages import Identity
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.ingress.openai_schema import ChatRequest, GenerationRequest
from shared.ingress.output_form import PLAIN, OutputForm
from shared.ingress.served_models import ServedModel

DEFAULT_MAX_TOKENS = 1024
MAX_PROMPT_SCORES = 384 * 1024
"""Most bytes of a prompt's log-probabilities: they cross the bus in one message."""
CLASS_OF_TIER = {"priority": "interactive", "flex": "analysis"}
"""Service tiers that ask for a class; the others take the tenant's own."""
_U64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request ready to be admitted."""

    kind: str  # chat | completions
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    running_usage: bool = False  # in every chunk
    n: int = 1  # choices
    keep_stop: bool = False  # what ended a choice stays in its text
    echo: str | None = None  # stands before each choice's text
    klass: str = ""  # asked for; policy decides
    tier: str = ""  # the `service_tier` asked for
    timings: bool = False  # the answer tells them
    salt: bytes = b""  # KV is shared only where it is the same
    form: OutputForm = PLAIN  # how its outputs are read

    @property
    def choices(self) -> tuple[SamplingParams, ...]:
        """Sampling of every choice: they differ in their seeds, and the first one scores the prompt."""
        first = self.sampling
        others = (
            msgspec.structs.replace(first, seed=choice_seed(first.seed, i), prompt_logprobs=-1)
            for i in range(1, self.n)
        )
        return (first, *others)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of several outputs of a request; the first one has the request's own."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}|{choice}".encode(), digest_size=8).digest(), "little")


def prompt_field(request: GenerationRequest) -> str:
    """The field that holds the prompt, for errors."""
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def salt_of(text: str) -> bytes:
    """What stands for a client's `cache_salt` from here on: a digest, as the text may be a secret."""
    return hashlib.blake2b(text.encode(), digest_size=SALT_BYTES).digest()


def make_plan(
    request: GenerationRequest,
    prompt: list[int],
    model: ServedModel,
    *,
    identity: Identity,
    seed: int,
    number: int = 0,
) -> RequestPlan:
    """The plan of a tokenized request.

    Args:
        prompt: its token ids.
        model: the one that `request` asks for, by whichever name.
        identity: for the tenant's default and limit of output tokens.
        seed: used when the client gave none.
        number: of the prompt among those of the request.

    Raises:
        ContextExceeded: prompt and output do not fit.
        InvalidInput: no prompt, or a token id outside the vocabulary.
    """
    field = prompt_field(request)
    if not prompt:
        raise InvalidInput("the prompt has no tokens", param=field)
    max_tokens = max_output(len(prompt), request.output_limit, model.context, identity, field)
    for name, ids in ((field, prompt), ("logit_bias", request.bias_ids), ("stop_token_ids", request.stop_token_ids)):
        if max(ids, default=0) >= model.vocab_size:
            raise InvalidInput(f"{name}: token ids must be below {model.vocab_size}", param=name)
    if request.min_tokens > max_tokens:
        raise InvalidInput(f"min_tokens: above the {max_tokens} tokens there can be", param="min_tokens")
    defaults, logprobs = model.defaults, request.wanted_logprobs
    structure = model.codec.structure(request, prompt)
    echo = echo_of(request, prompt, model)
    if echo is not None and (len(prompt) - 1) * (4 + 8 * max(0, logprobs)) > MAX_PROMPT_SCORES:
        raise InvalidInput("logprobs: too many of a prompt this long; ask for fewer", param="logprobs")
    return RequestPlan(
        kind="chat" if isinstance(request, ChatRequest) else "completions",
        model=model.name,
        prompt=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            open_ended=request.output_limit is None,
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=defaults.top_k if request.top_k is None else request.top_k,
            seed=choice_seed((seed if request.seed is None else request.seed) & _U64, number * request.choices),
            ignore_eos=bool(request.ignore_eos),
            min_p=defaults.min_p if request.min_p is None else request.min_p,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=(
                defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
            ),
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            logprobs=logprobs,
            grammar=structure.grammar,
            prediction=pack_tokens(request.predicted_ids),
            prompt_logprobs=-1 if echo is None or len(prompt) == 1 else logprobs,
        ),
        stops=request.stop,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        running_usage=request.stream_options is not None and bool(request.stream_options.continuous_usage_stats),
        n=request.choices,
        keep_stop=bool(request.include_stop_str_in_output),
        echo=echo,
        klass=CLASS_OF_TIER.get(request.service_tier or "", ""),
        tier=request.service_tier or "",
        timings=bool(request.timings),
        salt=b"" if request.cache_salt is None else salt_of(request.cache_salt),
        form=structure.form,
    )


def echo_of(request: GenerationRequest, prompt: list[int], model: ServedModel) -> str | None:
    """The prompt's text, if the answer is to begin with it."""
    if isinstance(request, ChatRequest) or not request.echo:
        return None
    return model.codec.tokenizer.decode(prompt)


def max_output(num_prompt: int, asked: int | None, context: int, identity: Identity, field: str) -> int:
    """Most output tokens. Without a number from the client: the least of what fits, the tenant's default and limit."""
    rest = context - num_prompt
    if rest < 1:
        raise ContextExceeded(
            f"this model's context is {context} tokens; the prompt alone has {num_prompt}", param=field
        )
    if asked is None:
        limit = identity.limits.max_output_tokens or rest
        return max(1, min(rest, limit, identity.default_max_tokens or DEFAULT_MAX_TOKENS))
    if asked > rest:
        raise ContextExceeded(
            f"this model's context is {context} tokens; the prompt has {num_prompt} and {asked} are asked for",
            param=field,
        )
    return asked
