"""Everything a decode worker holds: requests from reservation to acknowledged final, and how each of them ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable

from services.decode import reserving
from services.decode.handoff_in import HandoffIn
from services.decode.held import Choice, Held
from services.decode.outputs import EndedOutputs
from services.decode.pace import Pace
from services.decode.reservation import ReservationTable
from services.decode.step_news import Drawn, StepNews, Updated
from services.decode.stream_outbox import StreamOutbox
from shared.bus.bus import Delivery
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Internal, to_wire
from shared.contracts.grants import Grant
from shared.contracts.ids import IngressId, RequestId
from shared.contracts.logprobs import pack_logprobs
from shared.contracts.messages import Reserve, StreamFrame
from shared.contracts.parts import Totals, sum_totals
from shared.contracts.tokens import completion_checksum, unpack_tokens
from shared.engine.batcher import Batcher
from shared.engine.sequence_update import ADMITTED, ERROR, PREEMPTED, REVOKED, SequenceUpdate
from shared.engine.worker_fences import Fences
from shared.engine.worker_shell import WorkerShell
from shared.kv.transfer import Transport
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names
from shared.telemetry.token_timings import TokenTimings

log = logging.getLogger("baton.decode")


class Book:
    """The requests of one decode worker. Runs on the event loop."""

    def __init__(self, shell: WorkerShell, fences: Fences, transport: Transport) -> None:
        self.shell = shell
        self.table = ReservationTable(fences)
        self.outbox = StreamOutbox(shell.worker, shell.incarnation)
        self.handoff = HandoffIn(shell, transport, self._kv_settled)
        self.held: dict[RequestId, Held] = {}
        self.ended = EndedOutputs()
        self._by_seq: dict[str, tuple[Held, int]] = {}
        self._numbers = itertools.count(1)
        self.pace = Pace(shell.core.options.publish_interval_s)
        self.news = StepNews(self.pace, lambda: shell.hop(self.send_news), self._has_begun, shell.clock)
        self._generated = 0  # tokens; told when somebody asks, as each step changes it
        shell.metrics.before_scrape(lambda: shell.metrics.total(names.GENERATION_TOKENS, self._generated))

    def register(self, message: Reserve, grant: Grant, delivery: Delivery) -> Held:
        """Known from here on, so that news that overtakes the planner's answer finds it."""
        number = next(self._numbers)
        now = self.shell.clock()
        choices = [
            Choice(f"{message.attempt.request_id}/{number}.{i}", TokenTimings(now))
            for i in range(len(message.sampling))
        ]
        held = Held(
            attempt=message.attempt,
            reserve=message,
            grant=grant,
            token_ids=tuple(unpack_tokens(message.token_ids)),
            choices=choices,
            lease_token=secrets.token_bytes(16),
            reserved_at=now,
            context=delivery.context,
            span=self.shell.tracer.start_span(
                "decode.run",
                context=delivery.context,
                attributes={a.FAKE: self.shell.core.facts.fake, a.REQUEST_ID: message.attempt.request_id},
            ),
            answer=asyncio.get_running_loop().create_future(),
        )
        self.held[message.attempt.request_id] = held
        for i, choice in enumerate(choices):
            self._by_seq[choice.seq_id] = (held, i)
            if grant.retention_s != 0:
                self.shell.tagger.chains.open(choice.seq_id, held.attempt, message.grant, message.tags, held.token_ids)
        self.outbox.open(held.attempt, message.ingress_id, len(choices), len(held.committed))
        return held

    def send_news(self) -> None:
        """Take what the engine has told, and send what is owed to the ingresses."""
        self.take_news()
        self._send_frames()

    def take_news(self) -> None:
        """Take what the engine has told: whoever ends a sequence needs all that came of it."""
        for told in self.news.take():
            if isinstance(told, Drawn):
                self._take_drawn(told)
            else:
                self._take_updates(told)

    def _take_updates(self, told: Updated) -> None:
        """What one step changed: tokens to the outbox, full blocks to the tagger, ends into finals."""
        changed = False
        for update in told.updates:
            entry = self._by_seq.get(update.seq_id)
            if entry is None:
                continue
            held, number = entry
            choice, token_ids = held.choices[number], update.token_ids
            choice.started_at = update.started_at
            if choice.ahead and token_ids:
                token_ids, choice.ahead = token_ids[choice.ahead :], 0
            if update.event:
                changed = True
                self._moved(held, choice, update.event)
            if update.prompt_logprobs:
                top = held.reserve.sampling[number].prompt_logprobs
                self.outbox.scored(held.attempt, number, pack_logprobs(update.prompt_logprobs, top))
            if token_ids:
                if choice.timings.count == 0 and number == 0 and not held.committed:
                    # a prompt counts once: not again where a request goes on after a loss
                    self.shell.metrics.inc(names.PROMPT_TOKENS, held.reserve.num_prompt_tokens)
                self._generated += len(token_ids)
                choice.saw(len(token_ids), told.at)
                logprobs = held.packed(number, update.logprobs) if update.logprobs else b""
                self.outbox.tokens(held.attempt, number, token_ids, logprobs)
            if any(update.completed):
                self.shell.tagger.completed(update.seq_id, update.completed, ask=True)
            if update.finish:
                changed = True
                self.finish(held, number, update)
        if changed:
            self.shell.changed()

    def _take_drawn(self, told: Drawn) -> None:
        for i, row in enumerate(told.plan.sequences):
            entry = self._by_seq.get(row.seq_id)
            if entry is None:
                continue
            held, number = entry
            choice = held.choices[number]
            choice.ahead += len(told.steps)
            for at, _ in told.steps:
                choice.saw(1, at)
            self._generated += len(told.steps)
            self.outbox.tokens(held.attempt, number, [token_ids[i] for _, token_ids in told.steps])

    def _has_begun(self, seq_id: str) -> bool:
        entry = self._by_seq.get(seq_id)
        return entry is None or entry[0].choices[entry[1]].timings.count > 0

    def _moved(self, held: Held, choice: Choice, event: str) -> None:
        """A choice's blocks were taken, or it has blocks again."""
        held.span.add_event(event)
        choice.revoked = event == REVOKED
        if event == ADMITTED and choice is held.choices[0]:
            held.arrived.set()
        choice.preemptions += event == PREEMPTED

    def finish(self, held: Held, number: int, update: SequenceUpdate) -> None:
        choice = held.choices[number]
        totals = held.account(choice, update.totals or Totals())
        error = None
        if update.finish == ERROR:
            whose = {"span": held.span}
            log.error("%s ended with an error: %s", held.attempt.request_id, update.detail, extra=whose)
            error = to_wire(Internal("the model produced no usable output", code="engine_error"))
        self.outbox.finish(held.attempt, number, update.finish, totals, error)
        self.close_choice(held, number, update.finish)

    def close_choice(self, held: Held, number: int, finish: str) -> None:
        """The choice needs its sequence no more; with the last one the reservation is over."""
        choice = held.choices[number]
        if not choice.ended:
            choice.ended = finish
            self._by_seq.pop(choice.seq_id, None)
            self.shell.tagger.chains.close(choice.seq_id)
        if held.ended and self.table.get(held.attempt) is not None:
            self.end_reservation(held)
            reserving.end_span(held)
            if held.sink is not None:
                self.handoff.apply(held, held.sink.close())

    def end_reservation(self, held: Held) -> None:
        """It runs no more: beats list it no longer, and say what it came to."""
        self.table.end(held.attempt)
        self.ended.add(held.attempt, held.num_verified, self.shell.clock())

    def finish_resumed(self, held: Held, finish: str) -> None:
        """What was committed before is all there is to be: nothing runs, a final is owed."""
        totals = Totals(
            prompt_tokens=held.reserve.num_prompt_tokens,
            completion_tokens=len(held.committed),
            checksum=completion_checksum(held.committed),
        )
        self.outbox.finish(held.attempt, 0, finish, totals)
        self.close_choice(held, 0, finish)
        self.send_news()

    async def end(self, held: Held, reason: str) -> Totals:
        """Cancel what still runs and forget the request. Returns its account."""
        totals = [t for i in range(len(held.choices)) if (t := self.outbox.finished(held.attempt, i)) is not None]
        running = [(i, c) for i, c in enumerate(held.choices) if not c.ended]
        self.ended.add(held.attempt, held.num_generated, self.shell.clock())
        self.forget(held)
        for choice in held.running:
            choice.ended = reason
        if held.sink is not None:
            self.handoff.apply(held, held.sink.close())

        def cancel(batcher: Batcher) -> list[Totals | None]:
            return [batcher.cancel(choice.seq_id) for _, choice in running]

        try:
            ended = await self.shell.call(cancel)
        except BatonError:  # the engine has stopped: nothing runs any more
            ended = []
        finally:
            reserving.end_span(held)
        totals += [held.account(c, t) for (_, c), t in zip(running, ended or [None] * len(running), strict=True) if t]
        self.shell.changed()
        return sum_totals(totals)

    async def fail(self, held: Held, error: BatonError) -> None:
        """End what runs with an error final: every accepted request ends."""
        running = [i for i, c in enumerate(held.choices) if not c.ended]
        seq_ids = [held.choices[i].seq_id for i in running]
        totals = await self.shell.call(lambda batcher: [batcher.cancel(seq_id) for seq_id in seq_ids])
        self.take_news()
        for i, total in zip(running, totals, strict=True):
            account = held.account(held.choices[i], total or Totals())
            self.outbox.finish(held.attempt, i, ERROR, account, to_wire(error))
            self.close_choice(held, i, ERROR)
        self.send_news()

    def forget(self, held: Held) -> None:
        if self.held.get(held.attempt.request_id) is held:
            del self.held[held.attempt.request_id]
        held.arrived.set()
        self.outbox.drop(held.attempt)
        for choice in held.choices:
            self._by_seq.pop(choice.seq_id, None)
            self.shell.tagger.chains.close(choice.seq_id)

    def forget_given_up(self) -> None:
        """Requests whose finals nobody acknowledged in time."""
        for held in [h for h in self.held.values() if h.ended and not self.outbox.holds(h.attempt)]:
            self.forget(held)

    def _kv_settled(self, held: Held) -> None:
        self.table.kv_settled(held.attempt)
        self.shell.changed()

    def _send_frames(self) -> None:
        now = self.shell.clock()
        if frames := self.outbox.frames(now):
            self.pace.published(now)
            self.send(frames)

    def send(self, frames: Iterable[tuple[IngressId, StreamFrame]]) -> None:
        for ingress, frame in frames:
            self.shell.publisher.send(subjects.stream(ingress), frame)
