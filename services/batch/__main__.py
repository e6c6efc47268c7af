"""`python -m services.batch`: wiring only."""

from __future__ import annotations

from shared.lifecycle.runtime import Runtime, run_service
from shared.store.redis_store import connect_redis

REDIS_PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD_FILE"


async def main(runtime: Runtime) -> None:
    password = runtime.secret_text(REDIS_PASSWORD_VARIABLE)
    await runtime.stack.enter_async_context(connect_redis(runtime.settings.store.redis_url, password=password))
    runtime.ready()
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("batch", main)
