"""What policy takes from the settings, in one frozen object."""

from __future__ import annotations

from services.policy.admission import Terms
from services.policy.service import Defaults
from shared.contracts.grants import Limits
from shared.settings.sections import Settings


def policy_defaults(settings: Settings) -> Defaults:
    """What holds for tenants without limits of their own, and how long requests of each class may take."""
    section = settings.policy
    budget_s = {
        "interactive": section.interactive_budget_s,
        "analysis": section.analysis_budget_s,
        "batch": section.batch_budget_s,
    }
    return Defaults(
        limits=Limits(
            requests_per_minute=section.requests_per_minute,
            tokens_per_minute=section.tokens_per_minute,
            batch_enqueued_tokens=settings.batch.enqueued_tokens,
            max_parallel=section.max_parallel,
        ),
        max_tokens=section.default_max_tokens,
        terms=Terms(budget_s),
    )
