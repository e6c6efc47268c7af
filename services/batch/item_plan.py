"""An item's body to a request that can be admitted."""

from __future__ import annotations

import hashlib

from services.batch.records import ItemBody
from services.batch.tenant_terms import tenant_terms
from services.batch.validation import ENDPOINTS
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import RequestId, TenantId
from shared.contracts.messages import Identity
from shared.ingress.ingress import Ingress
from shared.ingress.request_plan import RequestPlan, make_plan


async def plan_item(ingress: Ingress, tenant: TenantId, request_id: RequestId, body: ItemBody) -> RequestPlan:
    """The plan of an item.

    Raises InvalidInput for a body that cannot be run (any more), UnknownModel; what policy refuses with, Unavailable.
    """
    parse = ENDPOINTS.get(body.endpoint)
    if parse is None:
        raise InvalidInput(f"url: {body.endpoint[:64]!r} takes no batches", param="url")
    request = await ingress.models.parse(parse, body.body)
    if request.stream:
        raise InvalidInput("stream: a batch's answers are not streamed", param="stream")
    model = ingress.models.get(request.model)
    (prompt,) = await model.codec.encode(request)
    identity = Identity(tenant=tenant, key_id="")
    if request.output_limit is None and prompt:
        identity = await tenant_terms(ingress, tenant, request_id, model.name, len(prompt))
    return make_plan(request, prompt, model, identity=identity, seed=seed_of(request_id))


def seed_of(request_id: RequestId) -> int:
    """The seed of an item that names none, the same in every run; 64 bits."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
