"""Scope keys: 32 random bytes a scope, made on first use, kept in Redis sealed under the master key.

They never leave this process and are never logged. Losing one makes its tags meaningless, which is what a purge wants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from shared.contracts.errors import Forbidden
from shared.contracts.ids import KeyVersion, ScopeGeneration, TenantId
from shared.security.tags import KEY_BYTES
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer

FIRST_VERSION = KeyVersion(1)
CACHED_KEYS = 4096

# KEYS: hash of a tenant's keys, hash of generations; ARGV: scope id, key, tenant, generation. Answers the key, made now
# if there is none; nothing when the generation is over, so that no key of it comes back behind a purge.
_MAKE = """
if tonumber(redis.call('HGET', KEYS[2], ARGV[3]) or '0') > tonumber(ARGV[4]) then
  return false
end
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])
"""

# KEYS[1] hash; ARGV: field, number. Keeps the larger.
_RAISE = """
local found = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
if tonumber(ARGV[2]) > found then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
return 1
"""


class StoredKey(msgspec.Struct, frozen=True):
    """A scope's key in Redis. The version is authenticated with the sealed bytes."""

    version: KeyVersion
    sealed: bytes
    generation: ScopeGeneration = ScopeGeneration(0)  # of the scope; 0: made before it was noted


class ScopeKeys:
    """Keys and generations of all scopes, in Redis.

    Args:
        redis: where they are kept.
        sealer: of the master key.
        random_bytes: makes a key of n bytes.
        prefix: of every Redis key; tests keep apart by it.

    Methods raise Unavailable when Redis does not answer, Internal when a stored key does not open.
    """

    def __init__(
        self,
        redis: RedisStore,
        sealer: Sealer,
        random_bytes: Callable[[int], bytes],
        prefix: str = "baton:index",
    ) -> None:
        self._redis = redis
        self._sealer = sealer
        self._random_bytes = random_bytes
        self._prefix = prefix
        self._cache: OrderedDict[tuple[TenantId, str], bytes] = OrderedDict()
        self._forgotten: dict[TenantId, int] = {}  # how often; what was read before is not cached behind it

    async def key(self, tenant: TenantId, scope_id: str, generation: ScopeGeneration) -> bytes:
        """The key of a scope of this generation, made now if there is none; replicas that make one at the same time end
        up with one. Raises Forbidden (`scope_ended`) when the generation is over and the key gone."""
        cached = self._cache.get((tenant, scope_id))
        if cached is not None:
            self._cache.move_to_end((tenant, scope_id))
            return cached
        forgotten = self._forgotten.get(tenant)
        name = self._keys_of(tenant)
        found = await self._redis.execute("HGET", name, scope_id)
        if found is None:
            sealed = self._sealer.seal(tenant, _place(scope_id, FIRST_VERSION), self._random_bytes(KEY_BYTES))
            made = msgspec.msgpack.encode(StoredKey(FIRST_VERSION, sealed, generation))
            found = await self._redis.script(_MAKE, [name, self._newest], [scope_id, made, tenant, generation])
            if found is None:
                raise Forbidden("the scope of this grant has ended", code="scope_ended")
        stored = msgspec.msgpack.decode(found, type=StoredKey)
        key = self._sealer.unseal(tenant, _place(scope_id, stored.version), stored.sealed)
        if self._forgotten.get(tenant) == forgotten:
            self._cache[tenant, scope_id] = key
        if len(self._cache) > CACHED_KEYS:
            self._cache.popitem(last=False)
        return key

    def forget(self, tenant: TenantId) -> None:
        """Drop a tenant's keys from memory; those still in use are read again."""
        self._forgotten[tenant] = self._forgotten.get(tenant, 0) + 1
        for name in [name for name in self._cache if name[0] == tenant]:
            del self._cache[name]

    async def destroy(self, tenant: TenantId, below: ScopeGeneration) -> list[str]:
        """End the generations below `below` for good: the tombstone first, so that no key is made behind it, then the
        keys. Returns the ids of the scopes whose key it was; without it their tags say nothing any more."""
        await self.keep_generation(tenant, below)
        self.forget(tenant)
        name = self._keys_of(tenant)
        stored = _pairs(await self._redis.execute("HGETALL", name))
        over = [
            scope_id.decode()
            for scope_id, key in stored
            if msgspec.msgpack.decode(key, type=StoredKey).generation < below
        ]
        if over:
            await self._redis.execute("HDEL", name, *over)
        self.forget(tenant)  # what was read and cached meanwhile
        return over

    async def generations(self) -> dict[TenantId, ScopeGeneration]:
        """The newest generation of each tenant that was ever raised."""
        pairs = _pairs(await self._redis.execute("HGETALL", self._newest))
        return {TenantId(tenant.decode()): ScopeGeneration(int(number)) for tenant, number in pairs}

    async def keep_generation(self, tenant: TenantId, generation: ScopeGeneration) -> None:
        """Remember a generation over restarts; a lower one changes nothing."""
        await self._redis.script(_RAISE, [self._newest], [tenant, generation])

    @property
    def _newest(self) -> str:
        return f"{self._prefix}:generations"

    def _keys_of(self, tenant: TenantId) -> str:
        return f"{self._prefix}:scope-keys:{tenant}"


def _pairs(found: Mapping[bytes, bytes] | Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Fields and values, in either of the forms in which the client gives a hash."""
    if isinstance(found, Mapping):
        return list(found.items())
    return list(zip(found[::2], found[1::2], strict=True))


def _place(scope_id: str, version: KeyVersion) -> str:
    return f"index.scope-key/{scope_id}/{version}"
