"""The batch service's state: all of it in Redis, so that any process can go on where another one died.

    store = BatchStore(redis, sealer)
    store.files  uploads and files, in sealed chunks
    store.jobs   batches: records, states, indexes, leases
    store.items  what executors use: claim, put_result, settled, add_lost, add_dead_letter
    store.queue  the standing batch of lines that came over NATS
    store.purges everything of a tenant, deleted

Texts of tenants (lines, answers, file names, metadata) are sealed under the tenant's key. Each change that must be
one is a script in `lua/`. Every method raises Unavailable when Redis does not answer.
"""

from __future__ import annotations

from services.batch.file_store import FileStore
from services.batch.item_store import ItemStore
from services.batch.job_store import JobStore
from services.batch.keys import Keys
from services.batch.purge_store import PurgeStore
from services.batch.queue_store import QueueStore
from services.batch.store_limits import StoreLimits
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer


class BatchStore:
    """All stores on one Redis.

    Args:
        redis: with its append-only file on.
        sealer: of the master key.
        prefix: of every key; tests keep apart by it.
        limits: of each tenant.
    """

    def __init__(
        self, redis: RedisStore, sealer: Sealer, prefix: str = "baton:batch", limits: StoreLimits | None = None
    ) -> None:
        keys, limits = Keys(prefix), limits or StoreLimits()
        self.purges = PurgeStore(redis, keys)
        self.files = FileStore(redis, sealer, keys, limits)
        self.jobs = JobStore(redis, sealer, keys, limits)
        self.items = ItemStore(redis, sealer, keys)
        self.queue = QueueStore(redis, sealer, keys, limits)
