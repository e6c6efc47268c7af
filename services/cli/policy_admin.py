"""Questions to the running stack's policy under the command line's own NATS user."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from services.cli.credentials import ensure_credentials
from services.cli.servers import running_nats
from services.cli.state import StateFolder, state_path
from services.cli.words import NO_STACK
from shared.bus.nats_connection import connect_bus
from shared.contracts import subjects
from shared.contracts.errors import Unavailable
from shared.store.secrets import read_secret_text

ASK_S = 10.0
Reply = TypeVar("Reply", bound=msgspec.Struct)


def ask_policy(env: Mapping[str, str], ask: msgspec.Struct, reply_type: type[Reply]) -> Reply:
    """Policy's answer. Raises what it raises, Unavailable when no stack runs."""
    path = state_path(env)
    if not path.is_dir() or (state := StateFolder(path)).holder() is None:
        raise Unavailable(NO_STACK)
    credentials = ensure_credentials(state.secrets)
    server = running_nats(state.run, credentials.nats_config)
    if server is None:
        raise Unavailable(
            "the running stack has no NATS server of its own (bus.nats_url is set), or it is not ready yet; "
            "only through its own can policy be asked from here"
        )
    password = read_secret_text(credentials.nats_password(subjects.ADMIN))

    async def asking() -> Reply:
        async with connect_bus(server[1], subjects.ADMIN, password=password) as bus:
            found: Reply = await bus.request(subjects.POLICY_ADMIN, ask, reply_type, timeout_s=ASK_S)
            return found

    return asyncio.run(asking())
