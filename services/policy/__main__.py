"""`python -m services.policy`: wiring only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from services.policy.accounts import Accounts
from services.policy.admin import Admin
from services.policy.admin_desk import AdminDesk
from services.policy.bootstrap import apply_bootstrap, read_bootstrap
from services.policy.idempotency import IdempotencyRecords
from services.policy.idempotency_desk import IdempotencyDesk
from services.policy.ingress_watch import IngressWatch
from services.policy.lost_ingresses import LostIngresses
from services.policy.metrics import RunningGauge
from services.policy.orphans import Orphans
from services.policy.purges import Purges
from services.policy.records import Records
from services.policy.responses import ResponseRecords
from services.policy.responses_desk import ResponsesDesk
from services.policy.service import PolicyService
from services.policy.settings import policy_defaults
from services.policy.unclaimed_holds import UnclaimedHolds
from shared.contracts.errors import SettingsError
from shared.lifecycle.runtime import Runtime, run_service
from shared.lifecycle.tasks import end_tasks, every
from shared.security.grant_signature import GrantSigner
from shared.store.redis_store import connect_redis
from shared.store.sealed import Sealer
from shared.store.secrets import secret_path

log = logging.getLogger("baton.policy")

GRANT_KEY_VARIABLE = "BATON_GRANT_KEY_FILE"
MASTER_KEY_VARIABLE = "BATON_MASTER_KEY_FILE"
BOOTSTRAP_VARIABLE = "BATON_BOOTSTRAP_FILE"
REDIS_PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD_FILE"
LOOK_S = 1.0
"""Ingresses and what runs are looked at so often."""


async def main(runtime: Runtime) -> None:
    settings = runtime.settings
    if not settings.store.redis_url:
        raise SettingsError("REDIS_URL is not set; policy keeps tenants and quotas there", param="REDIS_URL")
    signer = GrantSigner.from_file(secret_path(runtime.env, GRANT_KEY_VARIABLE))
    redis = await runtime.stack.enter_async_context(
        connect_redis(settings.store.redis_url, password=runtime.secret_text(REDIS_PASSWORD_VARIABLE))
    )
    records = Records(redis)
    for path in filter(None, (runtime.env.get(BOOTSTRAP_VARIABLE), settings.policy.tenants)):
        await apply_bootstrap(read_bootstrap(Path(path)), records)
    accounts, defaults, watch = Accounts(redis), policy_defaults(settings), IngressWatch()
    service = PolicyService(runtime.bus, records, accounts, signer, defaults, runtime.metrics)
    await service.start()
    runtime.stack.push_async_callback(service.stop)
    sealer = Sealer(runtime.secret(MASTER_KEY_VARIABLE))
    kept = IdempotencyRecords(redis, sealer, settings.policy.idempotency_ttl_s, retention=records.retention_s)
    once = IdempotencyDesk(runtime.bus, records, kept, watch)
    await once.start()
    runtime.stack.push_async_callback(once.stop)
    responses = ResponseRecords(redis, sealer, settings.policy.response_ttl_s, retention=records.retention_s)
    stored = ResponsesDesk(runtime.bus, records, responses, watch)
    await stored.start()
    runtime.stack.push_async_callback(stored.stop)
    lost = LostIngresses(records, accounts, (kept, responses), watch, defaults.limits)
    unclaimed = UnclaimedHolds(records, accounts, watch, defaults.limits)
    gauge = RunningGauge(runtime.metrics, records, accounts)
    await runtime.stack.enter_async_context(_looking(once.ask_quiet, lost.sweep, unclaimed.sweep, gauge.refresh))
    await runtime.stack.enter_async_context(_looking(Orphans(runtime.bus, records, responses, watch).sweep))
    admin = Admin(runtime.bus, redis, records)
    owned = (("keyed_answers", kept), ("responses", responses))
    grants_live_s = max(defaults.terms.budget_s.values()) + defaults.terms.margin_s
    purges = Purges(
        runtime.bus, redis, admin, owned, watch, signer, grants_live_s=grants_live_s, metrics=runtime.metrics
    )
    await purges.start()
    runtime.stack.push_async_callback(purges.stop)
    await runtime.stack.enter_async_context(_looking(purges.sweep, period=purges.pause_s))
    desk = AdminDesk(runtime.bus, admin, records, accounts, purges)
    await desk.start()
    runtime.stack.push_async_callback(desk.stop)
    runtime.ready()
    await runtime.stop.wait()


@asynccontextmanager
async def _looking(
    *looks: Callable[[], Awaitable[None]], period: float | Callable[[], float] = LOOK_S
) -> AsyncIterator[None]:
    async def look() -> None:
        for one in looks:
            await one()

    task = asyncio.create_task(every(period, look, log))
    try:
        yield
    finally:
        await end_tasks([task])


if __name__ == "__main__":
    run_service("policy", main)
