"""The end of a batch: results for items that have none, then its files.

Results do not change any more, so the files come out the same whoever writes them, and their names are derived from
the batch's: a process that finds half of a file goes on behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from services.batch import job_states as states
from services.batch.output_files import Chunks, result_line, unfinished
from services.batch.records import PURPOSE_OUTPUT, FileMeta, ItemResult, Job
from services.batch.store import BatchStore
from shared.contracts.errors import Internal, NotFound
from shared.contracts.ids import FileId

AT_ONCE = 500
"""Items read or ended together."""


async def end_items(store: BatchStore, job: Job) -> None:
    """Give every item without a result one that says why it has none."""
    code = states.item_code(job)
    for numbers in _slices(job.total):
        names = await store.items.unfinished(job.tenant, job.batch_id, numbers)
        results = [(number, unfinished(custom_id, code)) for number, custom_id in names.items()]
        if results and not await store.items.end(job.tenant, job.batch_id, job.status, results):
            return
    now = await store.jobs.get(job.tenant, job.batch_id)
    if now.status == job.status and now.finished < now.total:
        raise Internal(f"{now.total - now.finished} items of {job.batch_id} have neither body nor result")


async def write_files(store: BatchStore, job: Job, clock: Callable[[], float]) -> None:
    """Write output and error file, each only if it has lines, and end the batch."""
    writers = {True: _Writer(store, job, "output", clock), False: _Writer(store, job, "errors", clock)}
    for numbers in _slices(job.total):
        results = await store.items.results(job.tenant, job.batch_id, numbers)
        if len(results) < len(numbers):
            if await store.jobs.status(job.tenant, job.batch_id) in states.ENDED:
                return
            raise Internal(f"results of {job.batch_id} are missing")
        for number in numbers:
            await writers[results[number].ok].add(number, results[number])
    ids = {"output_file_id": await writers[True].close(), "error_file_id": await writers[False].close()}
    if not await store.jobs.status(job.tenant, job.batch_id):  # purged meanwhile, and the files with it or now
        for file_id in filter(None, ids.values()):
            with suppress(NotFound):
                await store.files.delete(job.tenant, file_id)
        return
    final = states.change(job.status, states.final_status(job), int(clock()))
    await store.jobs.move(job, final | ids, ends=True)


class _Writer:
    """One file of a batch, opened with its first line."""

    def __init__(self, store: BatchStore, job: Job, kind: str, clock: Callable[[], float]) -> None:
        self._store = store
        self._job = job
        self._kind = kind
        self._clock = clock
        self._chunks = Chunks()
        self._written = 0
        self._file_id = FileId("")
        self._ready = False

    async def add(self, number: int, result: ItemResult) -> None:
        if not self._chunks.lines:
            await self._open()
        for chunk in self._chunks.add(result_line(self._job.batch_id, number, result)):
            await self._append(chunk)

    async def close(self) -> FileId:
        """The file's id; empty when it has no lines."""
        if self._file_id and not self._ready:
            if rest := self._chunks.rest():
                await self._append(rest)
            await self._store.files.close(self._job.tenant, self._file_id)
        return self._file_id

    async def _open(self) -> None:
        now_s = int(self._clock())
        after_s = self._job.spec.output_expires_after_s
        meta = FileMeta(
            f"{self._job.batch_id}_{self._kind}.jsonl", PURPOSE_OUTPUT, now_s, now_s + after_s if after_s else 0
        )
        name = hashlib.blake2b(f"{self._job.batch_id} {self._kind}".encode(), digest_size=16).hexdigest()
        tenant = self._job.tenant
        self._file_id = await self._store.files.open(tenant, meta, now_s, FileId(f"file-{name}"), self._job.made_us)
        self._ready = await self._store.files.is_ready(tenant, self._file_id)

    async def _append(self, chunk: bytes) -> None:
        if not self._ready:
            number, self._written = self._written, self._written + 1
            now_s = int(self._clock())
            await self._store.files.append(self._job.tenant, self._file_id, number, chunk, now_s, limited=False)


def _slices(total: int) -> list[Sequence[int]]:
    return [range(first, min(total, first + AT_ONCE - 1) + 1) for first in range(1, total + 1, AT_ONCE)]
