"""A tenant's NATS user: given, shown, taken away, in the files of a stack and in the server that runs on them.

nats-server reads its configuration anew at SIGHUP. Of an account that is new it takes the imports in force only at the
next time, so the signal is repeated until the credential works; connections that are there go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum

import nats
import nats.errors

from services.cli.credentials import Credentials, add_queue_tenant, ensure_credentials, remove_queue_tenant
from services.cli.nats_config import check_tenant, tenant_inbox, tenant_user
from services.cli.servers import running_nats
from services.cli.state import StateFolder
from shared.contracts import subjects
from shared.contracts.errors import Unavailable
from shared.contracts.ids import TenantId

FORCE_S = 15.0
"""How long a credential may take to be in force, or out of it."""
PAUSE_S = 0.25
PROBE_S = 3.0


@dataclass(frozen=True, slots=True)
class QueueUser:
    """What a tenant needs to use the queue; `url` is empty while no stack runs."""

    tenant: TenantId
    url: str
    user: str
    password: str
    inbox_prefix: str
    subjects: Mapping[str, str]

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def describe(tenant: TenantId, password: str, url: str) -> QueueUser:
    """The credential with all that goes with it. Pure."""
    names = {
        "submit": subjects.batch_submit(tenant),
        "results": subjects.batch_results(tenant),
        "done": subjects.batch_done(tenant),
    }
    return QueueUser(tenant, url, tenant_user(tenant), password, tenant_inbox(tenant), names)


def give(state: StateFolder, name: str) -> QueueUser:
    """A tenant's credential, made if there is none, in force if a stack runs.

    Raises InvalidInput for a name no subject may hold, before anything is written; SettingsError; Unavailable when the
    running server does not take it.
    """
    tenant = check_tenant(name)
    credentials = ensure_credentials(state.secrets)
    server = _server(state, credentials)
    password = add_queue_tenant(credentials, tenant)
    if server is None:
        return describe(tenant, password, "")
    user = describe(tenant, password, server[1])
    _until(server[0], user, Standing.WORKS)
    return user


def take(state: StateFolder, name: str) -> bool:
    """Take a tenant's credential away, from the running server too; False when there was none. Raises as `give`."""
    tenant = check_tenant(name)
    credentials = ensure_credentials(state.secrets)
    server = _server(state, credentials)
    path = credentials.queue_password(tenant)
    password = path.read_text().strip() if path.exists() else ""
    had = remove_queue_tenant(credentials, tenant)
    if had and server is not None:
        _until(server[0], describe(tenant, password, server[1]), Standing.REFUSED)
    return had


class Standing(Enum):
    """How a credential fares, in words for when it should fare otherwise."""

    WORKS = "NATS still lets it in"
    REFUSED = "NATS does not let it in"
    UNANSWERED = "NATS lets it in, but the batch service does not answer"


async def standing(user: QueueUser) -> Standing:
    """Try a credential: log in and ask for results, as the tenant would."""
    try:
        client = await nats.connect(
            user.url,
            user=user.user,
            password=user.password,
            inbox_prefix=user.inbox_prefix,
            connect_timeout=PROBE_S,
            allow_reconnect=False,
            max_reconnect_attempts=0,
            error_cb=_silent,
        )
    except (nats.errors.Error, OSError, TimeoutError):
        return Standing.REFUSED
    try:
        answer = await client.request(user.subjects["results"], b'{"limit": 1}', timeout=PROBE_S)
        return Standing.WORKS if "data" in json.loads(answer.data) else Standing.UNANSWERED
    except (nats.errors.Error, ValueError):
        return Standing.UNANSWERED
    finally:
        await client.close()


async def _silent(exc: Exception) -> None:
    """A refusal is an answer here, not news."""


def _until(pid: int, user: QueueUser, wanted: Standing) -> None:
    deadline = time.monotonic() + FORCE_S
    # The second signal of a pair finds the first one carried out.
    found = asyncio.run(standing(user))
    while found is not wanted:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the files of this stack are as asked, but {FORCE_S:g} s later user {user.user} fares otherwise at "
                f"{user.url}: {found.value}; see ./baton logs"
            )
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
        time.sleep(PAUSE_S)
        found = asyncio.run(standing(user))


def _server(state: StateFolder, credentials: Credentials) -> tuple[int, str] | None:
    """Process id and address of the stack's NATS server; None while no stack runs. Raises Unavailable while the stack
    starts, and when it uses a server that is not its own."""
    if state.holder() is None:
        return None
    if not state.record.exists():
        raise Unavailable("the stack is not ready yet; ask again when it is")
    found = running_nats(state.run, credentials.nats_config)
    if found is None:
        raise Unavailable(
            "the running stack uses a NATS server that is not its own (bus.nats_url); the accounts it needs are in "
            f"{credentials.nats_config}"
        )
    return found
