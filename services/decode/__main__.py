"""`python -m services.decode`: wiring only."""

from __future__ import annotations

from services.decode.service import DecodeWorker
from shared.engine.worker_start import DRAIN_S, grant_check, start_shell
from shared.engine.worker_transfer import open_transport
from shared.lifecycle.runtime import Runtime, run_service


async def main(runtime: Runtime) -> None:
    verify_grant = grant_check(runtime)
    shell, fences = await start_shell(runtime, "decode")
    worker = DecodeWorker(shell, fences, open_transport(shell), verify_grant)
    await worker.start()
    runtime.stack.push_async_callback(worker.stop, DRAIN_S)
    facts = shell.core.facts
    runtime.ready(worker=shell.worker, fake=facts.fake, computes=facts.computes)
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("decode", main)
