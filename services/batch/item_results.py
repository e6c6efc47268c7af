"""Results of items: from answers, errors and the reasons for giving one up. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from services.batch.item_rules import Poison
from services.batch.records import ItemResult
from shared.contracts.errors import BatonError
from shared.contracts.ids import RequestId
from shared.ingress.completion_body import Usage
from shared.ingress.error_body import error_body

POISON_CODE = "poison"


def answered(custom_id: str, request_id: RequestId, body: dict[str, Any], usage: Usage) -> ItemResult:
    """A success. Its tokens are the ones in the body's `usage`, which is what the file shows and what is billed."""
    return ItemResult(
        custom_id,
        status_code=200,
        request_id=request_id,
        body=msgspec.json.encode(body),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def failed(custom_id: str, request_id: RequestId, error: BatonError) -> ItemResult:
    """An error in the form a client would get it over HTTP."""
    body = error_body(error)
    return ItemResult(
        custom_id,
        status_code=error.status,
        request_id=request_id,
        body=msgspec.json.encode(body),
        error_code=body["error"]["code"] or error.code,
        error_message=body["error"]["message"],
    )


def poisoned(custom_id: str, request_id: RequestId, poison: Poison) -> ItemResult:
    """Given up: it never had an answer."""
    return ItemResult(custom_id, request_id=request_id, error_code=POISON_CODE, error_message=poison.reason)
