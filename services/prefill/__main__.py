"""`python -m services.prefill`: wiring only."""

from __future__ import annotations

from services.prefill.service import PrefillWorker
from shared.engine.worker_start import DRAIN_S, grant_check, start_shell
from shared.engine.worker_transfer import open_server
from shared.lifecycle.runtime import Runtime, run_service


async def main(runtime: Runtime) -> None:
    verify_grant = grant_check(runtime)
    shell, fences = await start_shell(runtime, "prefill")
    worker = PrefillWorker(shell, fences, verify_grant, open_server(shell))
    await worker.start()
    runtime.stack.push_async_callback(worker.stop, DRAIN_S)
    facts = shell.core.facts
    runtime.ready(worker=shell.worker, fake=facts.fake, computes=facts.computes)
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("prefill", main)
