"""What a checked request asks for, in the engine's terms. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.errors import ContextExceeded, InvalidInput
from shared.contracts.messages import Identity
from shared.contracts.sampling import SamplingParams
from shared.ingress.openai_schema import ChatRequest, GenerationRequest
from shared.ingress.served_models import ServedModel

DEFAULT_MAX_TOKENS = 1024
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


def prompt_field(request: GenerationRequest) -> str:
    """The field that holds the prompt, for errors."""
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def make_plan(
    request: GenerationRequest, prompt: list[int], model: ServedModel, *, identity: Identity, seed: int
) -> RequestPlan:
    """The plan of a tokenized request.

    Args:
        prompt: its token ids.
        model: the one that `request` asks for, by whichever name.
        identity: for the tenant's default and limit of output tokens.
        seed: used when the client gave none.

    Raises:
        ContextExceeded: prompt and output do not fit.
        InvalidInput: no prompt, or a token id outside the vocabulary.
    """
    field = prompt_field(request)
    if not prompt:
        raise InvalidInput("the prompt has no tokens", param=field)
    max_tokens = max_output(len(prompt), request.output_limit, model.context, identity, field)
    if max(prompt) >= model.vocab_size:
        raise InvalidInput(f"token ids must be below {model.vocab_size}", param=field)
    defaults = model.defaults
    return RequestPlan(
        kind="chat" if isinstance(request, ChatRequest) else "completions",
        model=model.name,
        prompt=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=defaults.top_k if request.top_k is None else request.top_k,
            seed=(seed if request.seed is None else request.seed) & _U64,
        ),
        stops=request.stop,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
    )


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
