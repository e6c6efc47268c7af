"""`python -m services.scheduler`: wiring only."""

from __future__ import annotations

from services.scheduler.service import SchedulerService
from services.scheduler.settings import scheduler_config
from shared.contracts.ids import new_process_id
from shared.lifecycle.runtime import Runtime, run_service


async def main(runtime: Runtime) -> None:
    config = scheduler_config(runtime.settings, new_process_id("scheduler"))
    service = SchedulerService(runtime.bus, config, metrics=runtime.metrics)
    await service.start()
    runtime.stack.push_async_callback(service.stop)
    runtime.ready()
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("scheduler", main)
