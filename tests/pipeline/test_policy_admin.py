"""Keys and limits changed from the command line, on the memory bus with a real Redis behind it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.policy.accounts import Accounts
from services.policy.admin import Admin
from services.policy.admin_desk import AdminDesk
from services.policy.admission import Terms, make_grant
from services.policy.ingress_watch import IngressWatch
from services.policy.purges import Purges
from services.policy.quota import Asker
from services.policy.records import Records
from services.policy.tenants import OwnLimits
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import AUDIT_STREAM
from shared.contracts import admin_messages as am
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import Conflict, InvalidInput
from shared.contracts.grants import Limits
from shared.contracts.ids import RequestId, TenantId
from shared.security.grant_signature import GrantSigner
from shared.store.redis_store import connect_redis
from tests.servers import RedisServer

ACME, OTHER = TenantId("acme"), TenantId("other")
SIGNER = GrantSigner(Ed25519PrivateKey.generate())
Ask = am.KeyCreate | am.KeyRevoke | am.LimitsChange | am.TermsChange | am.TenantsQuery


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def new_key(key: str, tenant: TenantId = ACME, name: str = "first") -> am.KeyCreate:
    return am.KeyCreate(tenant=tenant, key_id=name, key_hash=digest(key))


class Policy:
    """The desk, and what others hear of it."""

    def __init__(self, records: Records, accounts: Accounts, bus: MemoryBus) -> None:
        self.records = records
        self.accounts = accounts
        self.bus = bus
        self.events: list[m.PolicyEvent] = []
        self.audit: list[str] = []

    async def ask(self, message: Ask) -> tuple[am.TenantInfo, ...]:
        found: am.Tenants = await self.bus.request(subjects.POLICY_ADMIN, message, am.Tenants, timeout_s=5)
        return found.tenants


@pytest.fixture
async def policy(redis_server: RedisServer) -> AsyncIterator[Policy]:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "policy")
    async with connect_redis(redis_server.url) as redis:
        prefix = f"test-{secrets.token_hex(4)}"
        records = Records(redis, prefix)
        found = Policy(records, Accounts(redis, prefix), MemoryBus(broker, "admin"))

        async def on_audit(delivery: Delivery) -> None:
            found.audit.append(delivery.message.action)

        await bus.consume(AUDIT_STREAM, subjects.audit("policy"), m.AuditRecord, on_audit, durable="test")
        await found.bus.subscribe(subjects.POLICY_EVENTS, m.PolicyEvent, lambda d: found.events.append(d.message))
        admin = Admin(bus, redis, records)
        purges = Purges(bus, redis, admin, (), IngressWatch(), SIGNER, prefix=prefix, listened_s=0.0)
        desk = AdminDesk(bus, admin, records, found.accounts, purges)
        await desk.start()
        yield found
        await desk.stop()
        await bus.close()


async def test_a_key_is_made_with_its_tenant_and_ended(policy: Policy) -> None:
    assert await policy.ask(am.TenantsQuery(tenant=ACME)) == ()
    (made,) = await policy.ask(new_key("k1"))
    assert made == am.TenantInfo(ACME, (am.KeyInfo("first"),), klass="interactive", weight=1.0)
    # The answer may have been lost: asking again changes nothing.
    assert await policy.ask(new_key("k1")) == (made,)
    record = await policy.records.key(digest("k1"))
    assert record is not None
    assert (record.tenant, record.admin, record.revoked) == (ACME, False, False)
    (ended,) = await policy.ask(am.KeyRevoke(tenant=ACME, key_id="first"))
    assert ended.keys == (am.KeyInfo("first", revoked=True),)
    # A revoked key is not brought back by making it again.
    (again,) = await policy.ask(new_key("k1"))
    assert again.keys == (am.KeyInfo("first", revoked=True),)
    assert [event.kind for event in policy.events] == ["changed", "changed", "revoked", "changed"]
    assert policy.audit[:3] == ["key_created", "key_created", "key_revoked"]


async def test_names_and_keys_have_one_owner(policy: Policy) -> None:
    await policy.ask(new_key("k1"))
    with pytest.raises(Conflict, match="first"):
        await policy.ask(new_key("k2"))
    with pytest.raises(Conflict, match="in use"):
        await policy.ask(new_key("k1", OTHER))
    with pytest.raises(Conflict, match="in use"):
        await policy.ask(new_key("k1", ACME, "second"))


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (am.KeyCreate(tenant=TenantId("a.b"), key_id="x", key_hash=bytes(32)), "tenant"),
        (am.KeyCreate(tenant=ACME, key_id="a/b", key_hash=bytes(32)), "key_id"),
        (am.KeyCreate(tenant=ACME, key_id="x", key_hash=bytes(31)), "key_hash"),
        (am.KeyCreate(tenant=ACME, key_id="x", key_hash=bytes(32), max_parallel=-1), "max_parallel"),
        (am.KeyRevoke(tenant=ACME, key_id="none"), "key_id"),
        (am.LimitsChange(tenant=ACME, key_id="none", limits={"max_parallel": 1}), "key_id"),
        (am.LimitsChange(tenant=ACME, key_id="first", limits={"max_parallel": -1}), "max_parallel"),
        (am.LimitsChange(tenant=ACME, key_id="first", limits={"tokens_per_minute": 1}), "tokens_per_minute"),
        (am.LimitsChange(tenant=TenantId("nobody"), limits={}), "tenant"),
        (am.LimitsChange(tenant=ACME, limits={"colour": 1}), "colour"),
        (am.LimitsChange(tenant=ACME, limits={"tokens_per_minute": -1}), "tokens_per_minute"),
        (am.LimitsChange(tenant=ACME, limits={"tokens_per_minute": 2**60}), "tokens_per_minute"),
        (am.TermsChange(tenant=TenantId("nobody"), klass="batch"), "tenant"),
        (am.TermsChange(tenant=ACME, klass="urgent"), "klass"),
        (am.TermsChange(tenant=ACME, weight=-1.0), "weight"),
        (am.TermsChange(tenant=ACME, weight=float("nan")), "weight"),
        (am.TermsChange(tenant=ACME, weight=1e9), "weight"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(policy: Policy, ask: Ask, field: str) -> None:
    await policy.ask(new_key("k1"))
    with pytest.raises(InvalidInput) as caught:
        await policy.ask(ask)
    assert caught.value.param == field
    assert len(await policy.ask(am.TenantsQuery())) == 1


async def test_limits_change_one_by_one(policy: Policy) -> None:
    await policy.ask(new_key("k1"))
    await policy.ask(am.LimitsChange(tenant=ACME, limits={"tokens_per_minute": 100, "requests_per_minute": 0}))
    (found,) = await policy.ask(am.LimitsChange(tenant=ACME, limits={"tokens_per_minute": None}))
    assert found.limits == {"requests_per_minute": 0}
    record = await policy.records.tenant(ACME)
    assert record is not None
    assert record.limits == OwnLimits(requests_per_minute=0)


async def test_class_and_weight_change_one_by_one_and_are_in_the_next_grant(policy: Policy) -> None:
    await policy.ask(new_key("k1"))
    await policy.ask(am.TermsChange(tenant=ACME, weight=4.0))
    (found,) = await policy.ask(am.TermsChange(tenant=ACME, klass="analysis"))
    assert (found.klass, found.weight) == ("analysis", 4.0)
    assert policy.events[-1].kind == "changed"
    assert policy.audit[-1] == "terms_changed"
    record = await policy.records.tenant(ACME)
    assert record is not None
    ask = m.AdmitTenant(request_id=RequestId("r"), tenant=ACME, model="m", num_prompt_tokens=1, max_tokens=1)
    terms = Terms(budget_s={"analysis": 60.0})
    grant = make_grant(ask, record, Limits(), "analysis", 0.0, terms)
    assert grant.weight == 4.0


async def test_a_key_has_a_limit_of_requests_at_once_from_the_beginning_or_later(policy: Policy) -> None:
    (made,) = await policy.ask(msgspec.structs.replace(new_key("k1"), max_parallel=3))
    assert made.keys == (am.KeyInfo("first", max_parallel=3),)
    (changed,) = await policy.ask(am.LimitsChange(tenant=ACME, key_id="first", limits={"max_parallel": 5}))
    assert (changed.keys[0].max_parallel, changed.limits) == (5, {})
    (changed,) = await policy.ask(am.LimitsChange(tenant=ACME, key_id="first", limits={"max_parallel": None}))
    assert changed.keys[0].max_parallel == 0
    assert policy.audit[-1] == "key_limited"
    assert policy.events[-1].kind == "changed"


async def test_what_runs_is_shown_by_key(policy: Policy) -> None:
    await policy.ask(new_key("k1"))
    await policy.ask(new_key("k2", name="second"))
    for number, key_id in enumerate(("first", "first", "second", "")):
        await policy.accounts.reserve(ACME, Limits(), f"r{number}", 1, 10**9, asker=Asker(key_id))
    await policy.accounts.reserve(ACME, Limits(), "over", 1, 0, asker=Asker("first"))
    (found,) = await policy.ask(am.TenantsQuery(tenant=ACME))
    assert found.running == 4
    assert [(key.id, key.running) for key in found.keys] == [("first", 2), ("second", 1)]


async def test_all_tenants_are_listed_with_their_keys(policy: Policy) -> None:
    await policy.ask(new_key("o", OTHER))
    await policy.ask(new_key("a2", ACME, "second"))
    await policy.ask(new_key("a1", ACME, "first"))
    found = await policy.ask(am.TenantsQuery())
    assert [(tenant.id, [key.id for key in tenant.keys]) for tenant in found] == [
        (ACME, ["first", "second"]),
        (OTHER, ["first"]),
    ]
