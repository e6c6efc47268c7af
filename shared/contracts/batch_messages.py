"""Messages of files, batches and their items: gateway → batch service, tenant → batch service, and its own queue.

Every message names its tenant; the gateway has checked whose key asked. Ids of strangers (`file_id`, `after`) are text
to be looked up among that tenant's own, never parts of subjects. Times are unix seconds; 0 = not so far.
"""

from __future__ import annotations

import msgspec

from shared.contracts.ids import BatchId, FileId, TenantId
from shared.contracts.message import Message

FILE_CHUNK_BYTES = 256 * 1024
"""Most bytes of a file in one message, either way."""

# ---------------------------------------------------------------------------------------------- files


class FileOpen(Message, frozen=True, kw_only=True):
    """gateway → batch, `batch.files`: begin an upload."""

    tenant: TenantId
    filename: str
    purpose: str
    expires_after_s: int = 0  # 0: kept until deleted


class FileOpened(Message, frozen=True, kw_only=True):
    """batch → gateway."""

    file_id: FileId


class FileAppend(Message, frozen=True, kw_only=True):
    """gateway → batch: the next chunk, numbered from 0. The same chunk again changes nothing; a gap is a Conflict."""

    tenant: TenantId
    file_id: FileId
    number: int
    data: bytes


class FileAppended(Message, frozen=True, kw_only=True):
    """batch → gateway: bytes held so far."""

    num_bytes: int


class FileClose(Message, frozen=True, kw_only=True):
    """gateway → batch: the upload is complete, or given up. A file exists for others only once it is closed."""

    tenant: TenantId
    file_id: FileId
    abort: bool = False
    expires_after_s: int = 0  # from its creation, where it became known only after the content; 0 = as opened
    once: str = ""  # id of a request under an Idempotency-Key: a file closed under it before is answered instead


class FileGet(Message, frozen=True, kw_only=True):
    """gateway → batch: one file's record."""

    tenant: TenantId
    file_id: FileId


class FileList(Message, frozen=True, kw_only=True):
    """gateway → batch: a page of the tenant's files, newest first unless `ascending`."""

    tenant: TenantId
    purpose: str = ""
    after: str = ""
    limit: int = 10_000
    ascending: bool = False


class FileRead(Message, frozen=True, kw_only=True):
    """gateway → batch: bytes of a file from `offset` on, at most FILE_CHUNK_BYTES of them."""

    tenant: TenantId
    file_id: FileId
    offset: int = 0


class FileBytes(Message, frozen=True, kw_only=True):
    """batch → gateway. The file ends at `num_bytes`."""

    data: bytes
    num_bytes: int


class FileDelete(Message, frozen=True, kw_only=True):
    """gateway → batch: delete a file. A Conflict while a batch that has not ended reads it."""

    tenant: TenantId
    file_id: FileId


class FileDeleted(Message, frozen=True, kw_only=True):
    """batch → gateway."""

    file_id: FileId


class FileInfo(Message, frozen=True, kw_only=True):
    """batch → gateway: one file."""

    file_id: FileId
    filename: str
    purpose: str  # batch | batch_output
    num_bytes: int
    created_s: int
    expires_s: int = 0


class FilePage(Message, frozen=True, kw_only=True):
    """batch → gateway."""

    files: tuple[FileInfo, ...] = ()
    has_more: bool = False


FileRequest = FileOpen | FileAppend | FileClose | FileGet | FileList | FileRead | FileDelete
FileReply = FileOpened | FileAppended | FileInfo | FilePage | FileBytes | FileDeleted


# ---------------------------------------------------------------------------------------------- batches


class BatchCreate(Message, frozen=True, kw_only=True):
    """gateway → batch, `batch.jobs`: begin a batch over an uploaded file. Answered in state `validating`."""

    tenant: TenantId
    input_file_id: FileId
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    output_expires_after_s: int = 0
    enqueued_tokens_limit: int = 0  # the tenant's; 0 = none
    models: tuple[str, ...] = ()  # the tenant may use; empty = every one
    batch_id: BatchId = BatchId("")  # of a request under an Idempotency-Key: a batch that is there already is answered


class BatchGet(Message, frozen=True, kw_only=True):
    """gateway → batch."""

    tenant: TenantId
    batch_id: BatchId


class BatchCancel(Message, frozen=True, kw_only=True):
    """gateway → batch: end it, keeping what has finished. A Conflict when it has ended already."""

    tenant: TenantId
    batch_id: BatchId


class BatchList(Message, frozen=True, kw_only=True):
    """gateway → batch: a page of the tenant's batches, newest first."""

    tenant: TenantId
    after: str = ""
    limit: int = 20


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a batch failed. `line` counts from 1; 0 = of the whole file."""

    code: str
    message: str
    line: int = 0
    param: str = ""


class BatchInfo(Message, frozen=True, kw_only=True):
    """batch → gateway: one batch."""

    batch_id: BatchId
    endpoint: str
    input_file_id: FileId
    completion_window: str
    status: str  # validating | failed | in_progress | finalizing | completed | expired | cancelling | cancelled
    created_s: int
    expires_s: int
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
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    errors: tuple[BatchError, ...] = ()
    dead_letters: tuple[BatchError, ...] = ()  # items given up: `line` their number, `param` their custom_id


class BatchPage(Message, frozen=True, kw_only=True):
    """batch → gateway."""

    batches: tuple[BatchInfo, ...] = ()
    has_more: bool = False


BatchRequest = BatchCreate | BatchGet | BatchCancel | BatchList
BatchReply = BatchInfo | BatchPage


# ---------------------------------------------------------------------------------------------- items


class BatchItem(Message, frozen=True, kw_only=True):
    """batch → batch, JetStream `batch.item.<tenant>`: one item to run. Its line lies sealed in the store."""

    tenant: TenantId
    batch_id: BatchId
    number: int  # of the line in its batch, from 1
    custom_id: str
