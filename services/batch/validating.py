"""The step `validating`: a file's lines are checked as they are read and their bodies stored, then the batch begins.

Begun again after a crash it stores the same bodies under the same numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from services.batch import job_states as states
from services.batch.records import ItemBody, Job
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from services.batch.validation import Validator
from shared.contracts.batch_messages import BatchError
from shared.contracts.errors import ContextExceeded
from shared.ingress.openai_schema import GenerationRequest
from shared.ingress.served_models import ServedModels

PUT = 200
"""Bodies stored by one script."""


async def validate(
    store: BatchStore,
    job: Job,
    models: ServedModels,
    config: RunnerConfig,
    threads: Executor,
    clock: Callable[[], float],
) -> None:
    """Validate a batch from the start and move it on; stops early when it is cancelled or its time is up."""
    validator = Validator(
        job.spec.endpoint,
        partial(check_model, models, job.spec.models),
        partial(count_tokens, models),
        max_lines=config.max_lines,
        max_line_bytes=config.max_line_bytes,
    )
    run = asyncio.get_running_loop().run_in_executor
    async for data in store.files.chunks(job.tenant, job.spec.input_file_id):
        if clock() >= job.spec.expires_s:
            return
        if not await _keep(store, job, await run(threads, validator.feed, data)):
            return
        if validator.done:
            break
    if not validator.done and not await _keep(store, job, await run(threads, validator.finish)):
        return
    await _conclude(store, job, validator, int(clock()))


async def _keep(store: BatchStore, job: Job, items: Sequence[tuple[int, ItemBody]]) -> bool:
    """Store items; False when the batch is no longer being validated."""
    if not items:
        return await store.jobs.status(job.tenant, job.batch_id) == states.VALIDATING
    for start in range(0, len(items), PUT):
        if not await store.items.put_bodies(job.tenant, job.batch_id, states.VALIDATING, items[start : start + PUT]):
            return False
    return True


async def _conclude(store: BatchStore, job: Job, validator: Validator, now_s: int) -> None:
    errors = validator.errors
    if not errors:
        begin = states.change(job.status, states.IN_PROGRESS, now_s)
        limit = job.spec.enqueued_tokens_limit
        moved = await store.jobs.move(
            job,
            begin | {"total": validator.total, "model": validator.model},
            tokens=validator.tokens,
            tokens_limit=limit,
        )
        if moved != "over_limit":
            return
        errors = [
            BatchError(
                "token_limit_exceeded",
                f"the batch has {validator.tokens} prompt tokens; with those of your batches under way that is over "
                f"your limit of {limit}; wait until some are done",
            )
        ]
    await store.jobs.move(job, states.change(job.status, states.FAILED, now_s) | {"errors": errors}, ends=True)


def check_model(models: ServedModels, allowed: Sequence[str], name: str) -> None:
    """Raises UnknownModel naming the models the tenant may use."""
    models.get(name, allowed)


def count_tokens(models: ServedModels, request: GenerationRequest) -> int:
    """Prompt tokens; of one far too long for the context the context, as it will be refused when it is run.

    Raises InvalidInput for a prompt that has no tokens by this model.
    """
    model = models.get(request.model)
    try:
        return len(model.codec.encode_now(request)[0])
    except ContextExceeded:
        return model.context
