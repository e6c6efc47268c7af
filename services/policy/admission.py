"""May this request run, and as what? Pure; the quota is asked in between, by the shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.policy import quota
from services.policy.tenants import TenantRecord
from shared.contracts.errors import BatonError, ContextExceeded, InvalidInput, QuotaExceeded, UnknownModel
from shared.contracts.grants import SALT_BYTES, Grant, Limits, Placement, Scope, class_rank
from shared.contracts.messages import Admit, AdmitTenant

Ask = Admit | AdmitTenant

CLASSES = ("interactive", "analysis", "batch")
MAX_RESERVED_TOKENS = 100_000_000
"""A request for more is not meant; it also keeps quota arithmetic exact."""
ALL_TAKEN = "concurrency_limit_exceeded"


@dataclass(frozen=True, slots=True)
class Terms:
    """How long grants last, in seconds. `margin_s` covers clocks and the way back of the last message."""

    budget_s: Mapping[str, float]  # by class
    margin_s: float = 30.0


def reserved_tokens(ask: Ask) -> int:
    """The most a request can come to: its prompt once, and max_tokens for every choice."""
    return ask.num_prompt_tokens + ask.max_tokens * ask.choices


def check(ask: Ask, tenant: TenantRecord, limits: Limits) -> str:
    """The class the request will run in.

    Raises InvalidInput naming the field, UnknownModel, or ContextExceeded: before any quota is touched.
    """
    for field in ("num_prompt_tokens", "max_tokens", "choices"):
        if getattr(ask, field) < 1:
            raise InvalidInput(f"{field} must be at least 1", param=field)
    if len(ask.salt) not in (0, SALT_BYTES):
        raise InvalidInput(f"a salt has {SALT_BYTES} bytes", param="cache_salt")
    if tenant.models and ask.model not in tenant.models:
        raise UnknownModel(f"the model {ask.model!r} does not exist or is not open to you", param="model")
    context = ask.num_prompt_tokens + ask.max_tokens
    if limits.max_context_tokens and context > limits.max_context_tokens:
        raise ContextExceeded(
            f"prompt and output come to {context} tokens; your limit is {limits.max_context_tokens}", param="messages"
        )
    if limits.max_output_tokens and ask.max_tokens > limits.max_output_tokens:
        raise InvalidInput(f"max_tokens is above your limit of {limits.max_output_tokens}", param="max_tokens")
    if reserved_tokens(ask) > MAX_RESERVED_TOKENS:
        raise InvalidInput(f"a request may come to at most {MAX_RESERVED_TOKENS} tokens", param="max_tokens")
    if isinstance(ask, AdmitTenant):
        return "batch"
    if ask.klass and ask.klass not in CLASSES:
        raise InvalidInput(f"the class is one of {', '.join(CLASSES)}", param="class")
    # nobody rises above the class that the operator gave
    return max(tenant.klass, ask.klass or tenant.klass, key=class_rank)


def refusal(verdict: quota.Verdict, limits: Limits, asker: quota.Asker = quota.NO_KEY) -> tuple[BatonError, bool]:
    """The error of a quota's no, and whether it is for ever."""
    if verdict.reason == quota.TOO_LARGE:
        error = QuotaExceeded(
            f"the request alone is above your limit of {limits.tokens_per_minute} tokens per minute",
            param="max_tokens",
            code="request_too_large",
        )
        return error, True
    if verdict.reason in (quota.PARALLEL, quota.KEY_PARALLEL):
        return _all_taken(verdict, limits, asker), False
    limit = limits.requests_per_minute if verdict.reason == quota.REQUESTS else limits.tokens_per_minute
    what = verdict.reason.replace("_", " ")
    message = f"your limit of {limit} {what} is reached"
    return QuotaExceeded(message, param=verdict.reason, retry_after_s=verdict.retry_us / 1e6), False


def _all_taken(verdict: quota.Verdict, limits: Limits, asker: quota.Asker) -> BatonError:
    own = verdict.reason == quota.KEY_PARALLEL
    whose, limit = ("this key's", asker.max_parallel) if own else ("your", limits.max_parallel)
    return QuotaExceeded(
        f"{whose} limit of {limit} requests at once is reached",
        param="max_parallel",
        retry_after_s=verdict.retry_us / 1e6,
        code=ALL_TAKEN,
    )


def make_grant(ask: Ask, tenant: TenantRecord, limits: Limits, klass: str, now_s: float, terms: Terms) -> Grant:
    """policy's yes. `now_s` is Redis time. The scope comes from the tenant's record; a request's salt only narrows it.

    A grant that took nothing from the limits a minute names no reservation.
    """
    budget_s = terms.budget_s[klass]
    return Grant(
        request_id=ask.request_id,
        tenant=tenant.id,
        scope=Scope(tenant=tenant.id, authorization=(), generation=tenant.generation, salt=ask.salt),
        model=ask.model,
        klass=klass,
        reservation_id="" if isinstance(ask, AdmitTenant) else str(ask.request_id),
        reserved_tokens=reserved_tokens(ask),
        expires_s=now_s + budget_s + terms.margin_s,
        budget_s=budget_s,
        weight=tenant.weight,
        retention_s=tenant.retention_s,
        limits=limits,
        placement=Placement(models=tenant.models),
        policy_version=tenant.version,
    )
