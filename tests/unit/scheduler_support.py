"""Short makers of what the scheduler's cores take, and a table with the plumbing of a test around it."""

from __future__ import annotations

from typing import Any

from services.scheduler.effects import AskMatch, AskPrefill, AskReserve, CancelAt, Effect, Tell
from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.ingresses import IngressRegistry
from services.scheduler.placement import WorkerView
from services.scheduler.placer import TableLimits
from services.scheduler.request_table import RequestTable
from services.scheduler.worker_registry import WorkerRegistry
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import (
    Dispatch,
    Epoch,
    Incarnation,
    IngressId,
    RequestId,
    ScopeGeneration,
    TenantId,
    Term,
    WorkerId,
)
from shared.contracts.parts import Holder, StepModel
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens

MODEL = StepModel(base_s=0.025, token_s=0.0012, sequence_s=0.0005, context_s=0.0)
INGRESS = IngressId("gateway-1")


def view(worker: str, role: str = "decode", **changes: Any) -> WorkerView:
    values: dict[str, Any] = {
        "incarnation": Incarnation(1),
        "free_blocks": (100,),
        "total_blocks": (100,),
        "block_sizes": (32,),
        "token_bytes": 46_080,
        "token_budget": 128 if role == "decode" else 512,
        "max_sequences": 8,
        "step_model": MODEL,
        "fingerprint": "f",
    }
    return WorkerView(worker=WorkerId(worker), role=role, **(values | changes))


def beat(worker: str, role: str = "decode", number: int = 1, **changes: Any) -> m.WorkerBeat:
    values: dict[str, Any] = {
        "pool": "default",
        "incarnation": Incarnation(1),
        "boot_id": "b",
        "host": "h",
        "free_blocks": (100,),
        "total_blocks": (100,),
        "block_sizes": (32,),
        "token_bytes": (46_080,),
        "token_budget": 128 if role == "decode" else 512,
        "max_sequences": 8,
        "step_model": MODEL,
        "numerics": "n",
        "fingerprint": "f",
    }
    return m.WorkerBeat(worker=WorkerId(worker), role=role, number=number, **(values | changes))


def grant(
    name: str, klass: str = "interactive", budget_s: float = 100.0, tenant: str = "t", weight: float = 1.0
) -> Grant:
    return Grant(
        request_id=RequestId(name),
        tenant=TenantId(tenant),
        weight=weight,
        scope=Scope(TenantId(tenant)),
        model="m",
        klass=klass,
        reservation_id="r",
        reserved_tokens=1,
        expires_s=0.0,
        budget_s=budget_s,
    )


def attempt(name: str, epoch: int = 1, dispatch: int = 0) -> Attempt:
    return Attempt(RequestId(name), Epoch(epoch), Dispatch(dispatch))


def submit(name: str, num_tokens: int = 60, epoch: int = 1, age_s: float = 0.0, max_tokens: int = 8) -> m.Submit:
    return m.Submit(
        attempt=attempt(name, epoch),
        ingress_id=INGRESS,
        grant=SignedGrant(b"", b""),
        token_ids=pack_tokens(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=(SamplingParams(max_tokens=max_tokens),),
        age_s=age_s,
    )


def no_room(code: str = "Overloaded/no_blocks", never: bool = False) -> m.Refusal:
    return m.Refusal(error=ErrorInfo(code, "no"), never=never)


def reserved(num_cached_tokens: int = 0, already_running: bool = False) -> m.Reserved:
    return m.Reserved(
        incarnation=Incarnation(1),
        num_cached_tokens=num_cached_tokens,
        lease_token=b"t" * 16,
        fingerprint="f",
        already_running=already_running,
    )


class Bench:
    """A request table, its registries, a clock, and the effects still to be answered."""

    def __init__(self, *, term: int = 1, gather_s: float = 0.0, **limits: Any) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry("default")
        self.ingresses = IngressRegistry()
        self.table = RequestTable(
            term=Term(term),
            now=0.0,
            registry=self.registry,
            ingresses=self.ingresses,
            cost=HandoffCost(),
            limits=TableLimits(gather_s=gather_s, **limits),
        )
        self.effects: list[Effect] = []
        self.told: list[Any] = []
        self.numbers: dict[str, int] = {}

    def take(self, effects: list[Effect]) -> None:
        """Collect effects; events are seen at once."""
        for effect in effects:
            if isinstance(effect, Tell):
                self.told.append(effect.event)
                self.take(self.table.events_seen(self.now, effect.ingress, effect.event.number))
            else:
                self.effects.append(effect)

    def lose(self, worker: str, reason: str = "gone") -> None:
        lost = self.registry.lose(WorkerId(worker), self.now, reason)
        assert lost is not None
        self.take(self.table.worker_lost(self.now, lost))

    def beat(self, worker: str, role: str = "decode", **changes: Any) -> None:
        self.numbers[worker] = self.numbers.get(worker, 0) + 1
        message = beat(worker, role, self.numbers[worker], **changes)
        outcome = self.registry.on_beat(self.now, message)
        if outcome.replaced is not None:
            self.take(self.table.worker_lost(self.now, outcome.replaced))
        if outcome.taken:
            self.take(self.table.worker_beat(self.now, message))

    def submit(self, message: m.Submit, **changes: Any) -> m.Queued | m.Refusal:
        answer, effects = self.table.submit(self.now, message, grant(message.attempt.request_id, **changes))
        self.take(effects)
        return answer

    def withdraw(self, name: str, epoch: int = 1) -> None:
        self.take(self.table.withdraw(self.now, attempt(name, epoch)))

    def pop(self, kind: type[Any]) -> Any:
        """Take out the oldest effect of a kind."""
        found = next(e for e in self.effects if isinstance(e, kind))
        self.effects.remove(found)
        return found

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(e, kind) for e in self.effects)

    def match(self, *holders: Holder) -> None:
        ask: AskMatch = self.pop(AskMatch)
        reply = m.Matched(scope_generation=ScopeGeneration(1), holders=holders)
        self.take(self.table.matched(self.now, ask.attempt, reply))

    def reserve(self, reply: m.Reserved | m.Refusal | None) -> AskReserve:
        ask: AskReserve = self.pop(AskReserve)
        self.take(self.table.reserve_replied(self.now, ask.message.attempt, ask.worker, reply))
        return ask

    def prefill(self, reply: m.PrefillAccepted | m.Refusal | None) -> AskPrefill:
        ask: AskPrefill = self.pop(AskPrefill)
        self.take(self.table.prefill_replied(self.now, ask.message.attempt, reply))
        return ask

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.take(self.table.tick(self.now))

    def cancels(self) -> list[tuple[str, Attempt]]:
        found = [e for e in self.effects if isinstance(e, CancelAt)]
        self.effects = [e for e in self.effects if not isinstance(e, CancelAt)]
        return [(e.worker, e.message.attempt) for e in found]
