"""Redis as services see it: a small async client whose failures are Baton errors.

Fail closed: no reply, no connection and a full server all become Unavailable, with a time to come back.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.contracts.errors import SettingsError, Unavailable

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 5.0
RETRY_AFTER_S = 2.0
MAX_CONNECTIONS = 64
"""Connections of one process; calls beyond wait for one, for at most CONNECTION_WAIT_S."""
CONNECTION_WAIT_S = 2.0


class RedisStore:
    """Commands, scripts and pipelines on one bounded pool of connections, for which calls queue.

    Replies are bytes, as Redis sends them.
    """

    # redis-py types its commands for both the sync and the async client; here every call is awaited.
    def __init__(self, client: Any) -> None:
        self._client = client

    async def execute(self, *command: str | bytes | int | float) -> Any:
        """Run one command, such as `execute("HGET", key, field)`. Raises Unavailable."""
        async with self._failures():
            return await self._client.execute_command(*command)

    async def script(self, source: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]) -> Any:
        """Run a Lua script, atomically, by its digest; the source is sent only when the server lacks it."""
        rest = (len(keys), *keys, *arguments)
        async with self._failures():
            try:
                return await self._client.execute_command("EVALSHA", _digest(source), *rest)
            except NoScriptError:
                return await self._client.execute_command("EVAL", source, *rest)

    async def script_behind(
        self,
        commands: Sequence[Sequence[str | bytes | int | float]],
        source: str,
        keys: Sequence[str],
        arguments: Sequence[str | bytes | int | float],
    ) -> tuple[list[Any], Any]:
        """Commands and then a Lua script in one round trip; the replies of the commands, and the script's.

        Others' commands may run between them: only the script is atomic. Raises Unavailable.
        """
        rest = (len(keys), *keys, *arguments)
        async with self._failures():
            async with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                pipeline.execute_command("EVALSHA", _digest(source), *rest)
                *replies, found = await pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            if isinstance(found, NoScriptError):
                found = await self._client.execute_command("EVAL", source, *rest)
            elif isinstance(found, Exception):
                raise found
            return replies, found

    async def transaction(self, commands: Sequence[Sequence[str | bytes | int | float]]) -> list[Any]:
        """Run several commands in one MULTI/EXEC round trip; their replies in order. Raises Unavailable."""
        async with self._failures(), self._client.pipeline(transaction=True) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute()
            return replies

    @asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        with redis_errors():
            try:
                yield
            except RedisConnectionError as exc:
                if not isinstance(exc.__cause__, TimeoutError):  # else it waited for one of the pool: all are in use
                    # A restarted server has closed every pooled connection: let one command pay for it, not each.
                    await self._client.connection_pool.disconnect(inuse_connections=False)
                raise

    async def now_s(self) -> float:
        """Redis' own clock in unix seconds: the one clock of ledger windows."""
        seconds, microseconds = await self.execute("TIME")
        return int(seconds) + int(microseconds) / 1e6


@asynccontextmanager
async def connect_redis(redis_url: str, *, password: str = "") -> AsyncIterator[RedisStore]:
    """Connect, check that Redis answers, and close on leaving.

    Args:
        redis_url: `redis://host:port/db`; a password inside it wins over `password`.
        password: empty connects without one.

    Raises SettingsError for a wrong URL or password, Unavailable when nobody answers.
    """
    credentials: dict[str, Any] = {"password": password} if password and "@" not in redis_url else {}
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=CONNECTION_WAIT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REPLY_TIMEOUT_S,
            health_check_interval=15,
            # A command whose answer was lost may have run: whether to ask again is the caller's business.
            retry=Retry(NoBackoff(), 0),
            **credentials,
        )
        client: Any = redis.asyncio.Redis.from_pool(pool)
    except ValueError as exc:
        raise SettingsError(f"REDIS_URL: {exc}", param="REDIS_URL") from exc
    try:
        try:
            with redis_errors():
                await client.ping()
        except Unavailable as exc:
            if isinstance(exc.__cause__, AuthenticationError):
                raise SettingsError("Redis refuses the password", param="REDIS_URL") from exc
            raise
        yield RedisStore(client)
    finally:
        await client.aclose()


@lru_cache(maxsize=256)
def _digest(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def redis_errors() -> Iterator[None]:
    """Map what redis-py raises to Unavailable."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise Unavailable(f"redis: {exc}", param="redis", retry_after_s=RETRY_AFTER_S) from exc
