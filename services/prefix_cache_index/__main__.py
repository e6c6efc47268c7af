"""`python -m services.prefix_cache_index`: wiring only."""

from __future__ import annotations

import secrets

from services.prefix_cache_index.fleet import Fleet
from services.prefix_cache_index.scope_keys import ScopeKeys
from services.prefix_cache_index.service import IndexService
from shared.contracts.errors import SettingsError
from shared.lifecycle.runtime import Runtime, run_service
from shared.security.grant_signature import GrantVerifier, load_public_keys
from shared.settings.models import served_models
from shared.store.redis_store import connect_redis
from shared.store.sealed import Sealer
from shared.store.secrets import secret_path

GRANT_PUBLIC_KEY_VARIABLE = "BATON_GRANT_PUBLIC_KEY_FILE"
MASTER_KEY_VARIABLE = "BATON_MASTER_KEY_FILE"
REDIS_PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD_FILE"


async def main(runtime: Runtime) -> None:
    settings = runtime.settings
    if not settings.store.redis_url:
        raise SettingsError("REDIS_URL is not set; the index keeps scope keys there", param="REDIS_URL")
    verifier = GrantVerifier(load_public_keys(secret_path(runtime.env, GRANT_PUBLIC_KEY_VARIABLE)))
    sealer = Sealer(runtime.secret(MASTER_KEY_VARIABLE))
    redis = await runtime.stack.enter_async_context(
        connect_redis(settings.store.redis_url, password=runtime.secret_text(REDIS_PASSWORD_VARIABLE))
    )
    keys = ScopeKeys(redis, sealer, secrets.token_bytes)
    pools = {model.name: model.pool for model in served_models(settings)} if settings.models else {}
    fleet = Fleet(settings.scheduler.worker_timeout_s, pools)
    service = IndexService(runtime.bus, keys, verifier, fleet=fleet, metrics=runtime.metrics)
    await service.start()
    runtime.stack.push_async_callback(service.stop)
    runtime.ready()
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("prefix-cache-index", main)
