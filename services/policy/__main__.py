"""`python -m services.policy`: wiring only."""

from __future__ import annotations

from pathlib import Path

from services.policy.accounts import Accounts
from services.policy.admin import Admin
from services.policy.admin_desk import AdminDesk
from services.policy.bootstrap import apply_bootstrap, read_bootstrap
from services.policy.records import Records
from services.policy.service import PolicyService
from services.policy.settings import policy_defaults
from shared.contracts.errors import SettingsError
from shared.lifecycle.runtime import Runtime, run_service
from shared.security.grant_signature import GrantSigner
from shared.store.redis_store import connect_redis
from shared.store.secrets import secret_path

GRANT_KEY_VARIABLE = "BATON_GRANT_KEY_FILE"
BOOTSTRAP_VARIABLE = "BATON_BOOTSTRAP_FILE"
REDIS_PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD_FILE"


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
    service = PolicyService(runtime.bus, records, Accounts(redis), signer, policy_defaults(settings), runtime.metrics)
    await service.start()
    runtime.stack.push_async_callback(service.stop)
    desk = AdminDesk(runtime.bus, Admin(runtime.bus, redis, records), records)
    await desk.start()
    runtime.stack.push_async_callback(desk.stop)
    runtime.ready()
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("policy", main)
