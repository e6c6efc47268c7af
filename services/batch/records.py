"""What the batch service keeps of files, jobs and items. Structs only; `store.py` says where they lie.

Times are unix seconds; 0 = not so far.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shared.contracts.batch_messages import BatchError, BatchInfo, FileInfo
from shared.contracts.ids import BatchId, FileId, TenantId

QUEUE_BATCH = BatchId("queue")
"""The standing batch of a tenant's items that came over NATS: no file, never ends."""
PURPOSE_INPUT, PURPOSE_OUTPUT = "batch", "batch_output"


class FileMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is fixed when an upload begins."""

    filename: str
    purpose: str
    created_s: int
    expires_s: int = 0


class StoredFile(msgspec.Struct, frozen=True):
    """A file as it stands. `readers` counts the batches that have not ended and read it."""

    file_id: FileId
    meta: FileMeta
    num_bytes: int
    ready: bool
    readers: int = 0

    def info(self) -> FileInfo:
        """As told to others."""
        return FileInfo(
            file_id=self.file_id,
            filename=self.meta.filename,
            purpose=self.meta.purpose,
            num_bytes=self.num_bytes,
            created_s=self.meta.created_s,
            expires_s=self.meta.expires_s,
        )


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is fixed when a batch is created."""

    endpoint: str
    created_s: int
    expires_s: int
    input_file_id: FileId = FileId("")
    completion_window: str = ""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    output_expires_after_s: int = 0
    enqueued_tokens_limit: int = 0
    models: tuple[str, ...] = ()
    """Models the tenant may use; empty = every one."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it stands. `status` and `ending` are `job_states` values; counts always equal the results."""

    tenant: TenantId
    batch_id: BatchId
    spec: JobSpec
    status: str
    ending: str = ""
    in_progress_s: int = 0
    finalizing_s: int = 0
    completed_s: int = 0
    failed_s: int = 0
    expired_s: int = 0
    cancelling_s: int = 0
    cancelled_s: int = 0
    output_file_id: FileId = FileId("")
    error_file_id: FileId = FileId("")
    total: int = 0
    completed: int = 0
    failed: int = 0
    claims: int = 0
    """How often an item was claimed: with the counts it shows whether anything moves."""
    enqueued: int = 0
    """Items 1 to this number have been put on the queue."""
    model: str = ""
    made_us: int = 0
    """When it was made by the clock of Redis, unix microseconds; 0: not known."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    errors: tuple[BatchError, ...] = ()
    dead_letters: tuple[BatchError, ...] = ()

    @property
    def finished(self) -> int:
        """Items with a result."""
        return self.completed + self.failed

    def info(self) -> BatchInfo:
        """As told to others."""
        return BatchInfo(
            batch_id=self.batch_id,
            endpoint=self.spec.endpoint,
            input_file_id=self.spec.input_file_id,
            completion_window=self.spec.completion_window,
            status=self.status,
            created_s=self.spec.created_s,
            expires_s=self.spec.expires_s,
            in_progress_s=self.in_progress_s,
            finalizing_s=self.finalizing_s,
            completed_s=self.completed_s,
            failed_s=self.failed_s,
            expired_s=self.expired_s,
            cancelling_s=self.cancelling_s,
            cancelled_s=self.cancelled_s,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            total=self.total,
            completed=self.completed,
            failed=self.failed,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            metadata=self.spec.metadata,
            errors=self.errors,
            dead_letters=self.dead_letters,
        )


class ItemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line to run: `body` is the JSON of its `body` field."""

    custom_id: str
    endpoint: str
    body: bytes
    prompt_tokens: int = 0


class ItemResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an item came to. Status 200 goes to the output file, anything else to the error file.

    `body` is the JSON answered, empty when there was no answer (cancelled, expired, poison); then `error_code` and
    `error_message` say why. Tokens are what is billed.
    """

    custom_id: str
    status_code: int = 0
    request_id: str = ""
    body: bytes = b""
    error_code: str = ""
    error_message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ok(self) -> bool:
        """True if it belongs to the output file."""
        return self.status_code == 200


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor learns when it takes an item from the queue.

    Run it only when `body` is there: then `epoch` was raised for this run. Else nothing is to be run: the item has a
    result (`done`), or its batch is not in progress (`status`; empty: it is gone). `settle` is the settlement handed to
    `put_result` that nobody has reported as published yet; publish it, report it, acknowledge.
    """

    status: str
    epoch: int
    done: bool = False
    body: ItemBody | None = None
    settle: bytes = b""
    lost: int = 0
    """How often a worker was lost while it ran this item, over all claims."""


class Put(Enum):
    """What became of a result handed in."""

    STORED = "stored"
    EXISTS = "exists"  # another result was first (also the batch's own `batch_cancelled` or `batch_expired`)
    FENCED = "fenced"  # the item was claimed again since
    ENDED = "ended"  # the batch is over or gone


class QueueSlot(msgspec.Struct, frozen=True):
    """A place in the standing batch. `duplicate`: another line had this custom_id before."""

    number: int
    duplicate: bool


class QueueResult(msgspec.Struct, frozen=True):
    """A finished item of the standing batch, at `cursor` in the order of finishing."""

    cursor: str
    number: int
    result: ItemResult
