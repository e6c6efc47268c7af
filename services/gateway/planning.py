"""A parsed request tokenized: the plans that it is run by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.dialect import CHUNKS, Dialect
from services.gateway.service import GatewayService
from shared.contracts.errors import InvalidInput, QuotaExceeded
from shared.contracts.messages import Identity
from shared.ingress.openai_schema import GenerationRequest
from shared.ingress.request_plan import RequestPlan, make_plan
from shared.ingress.served_models import ServedModel
from shared.telemetry import attributes as a

PlansOf = Callable[[int], Sequence[RequestPlan]]
"""The plans of a request by its seed."""


async def tokenized(
    service: GatewayService,
    parsed: GenerationRequest,
    model: ServedModel,
    identity: Identity,
    dialect: Dialect = CHUNKS,
) -> PlansOf:
    """Tokenized; what is wrong with the parameters the plans tell when they are made.

    Raises InvalidInput, or QuotaExceeded for more prompts than may ever run at once.
    """
    with service.telemetry.tracer.start_as_current_span("gateway.tokenize") as tokenize:
        try:
            prompts = await model.codec.encode(parsed)
        except InvalidInput as error:
            raise dialect.named(error) from None
        tokenize.set_attribute(a.PROMPT_TOKENS, sum(map(len, prompts)))
    _check_prompts(len(prompts), identity)

    def plans_of(seed: int) -> list[RequestPlan]:
        try:
            return [
                make_plan(parsed, prompt, model, identity=identity, seed=seed, number=number)
                for number, prompt in enumerate(prompts)
            ]
        except InvalidInput as error:
            raise dialect.named(error) from None

    return plans_of


def _check_prompts(count: int, identity: Identity) -> None:
    """Each prompt takes a place of its own: where all of them never fit, none is begun."""
    limit = min(filter(None, (identity.limits.max_parallel, identity.key_max_parallel)), default=count)
    if count > limit:
        raise QuotaExceeded(
            f"the request's {count} prompts alone are above your limit of {limit} requests at once",
            param="prompt",
            code="request_too_large",
        )
