"""Which tokens of which sequences a step computes: decodes first, then prompts within what the target leaves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq

from shared.engine.batcher_config import BatcherConfig
from shared.engine.batching_policy import make_policy
from shared.engine.block_room import BlockRoom, may_run, urgency
from shared.engine.fair_prefill import DeficitRoundRobin, PrefillWant
from shared.engine.prompt_budget import prompt_budget
from shared.engine.prompt_order import count_overtaking, least_first
from shared.engine.sequence import Sequence
from shared.engine.speculation import Drafts, Speculation
from shared.engine.step_plan import ScheduledSequence
from shared.engine.step_time import StepTimeModel

LEAST_STEPS, MOST_STEPS = 4, 64
"""Of a stretch: for fewer it does not pay that nothing is planned ahead when it begins and ends."""
SCORED_CHUNK = 64
"""Most prompt tokens in a step whose log-probabilities are wanted: each makes a row of logits, which take memory."""


class StepComposer:
    """Admission of a batcher's sequences into its steps.

    Args:
        sequences: the batcher's own, in order of arrival.
    """

    def __init__(
        self, config: BatcherConfig, room: BlockRoom, sequences: Mapping[str, Sequence], speculation: Speculation
    ) -> None:
        self._speculation = speculation
        self._config = config
        self._room = room
        self._sequences = sequences
        self._fair = DeficitRoundRobin(config.quantum)
        size = min(config.batch_size, config.max_num_seqs)
        self._policy = make_policy(config.batching, size, config.batch_window_s)

    def stretch(self, model: StepTimeModel) -> int:
        """Steps that may be planned at once, with blocks for all of them; 1: no more than one.

        That is where all who are here decode, plainly. Whoever comes meanwhile ends the stretch with the step it is at.
        """
        if not (self._config.stretch_s and self._policy.admits_all):
            return 1
        seqs, most = list[Sequence](), MOST_STEPS
        for seq in self._sequences.values():
            if not seq.finish:
                most = min(most, seq.most_steps)
                if most < LEAST_STEPS:
                    return 1
                seqs.append(seq)
        if not seqs:
            return 1
        step_s = model.predict(len(seqs), len(seqs), sum(seq.num_computed_tokens + 1 for seq in seqs))
        most = min(most, int(self._config.stretch_s / max(1e-9, step_s)))
        most = self._speculation.most_steps(model, seqs, most)
        most = self._room.reach(seqs, most) if most >= LEAST_STEPS else 1
        return most if most >= LEAST_STEPS else 1

    def compose(
        self, model: StepTimeModel, now: float, repeats: int = 1, *, ahead: bool = False
    ) -> list[ScheduledSequence]:
        """The rows of the next step, their sequences advanced; none when nothing can run.

        Sequences one token behind come first, one row each, the most urgent class and the oldest before others; then
        chunks of prompts, shared out among tenants, the most urgent and shortest of each first. Preempted sequences get
        their blocks back before, where there is room.

        Args:
            now: seconds on a monotonic clock.
            repeats: of all rows, as found by `stretch` just before.
            ahead: steps are in flight. Nothing is composed then where it would keep a sequence from speculating, or go
                without one that waits for what became of its draft: that one would run every second step only.
        """
        allowed = _Lazily(self._allowed, now)
        if self._room.has_homeless:
            self._room.let_return(allowed())
        ids = None if self._policy.admits_all else allowed()
        decodes, behind, guessing = list[Sequence](), list[tuple[Sequence, int]](), False
        for seq in self._sequences.values():
            count = seq.num_pending_tokens
            if count and (ids is None or may_run(seq, ids)):
                if count == 1:
                    decodes.append(seq)
                else:
                    behind.append((seq, count))
            elif seq.num_drafted and not (seq.finish or seq.leaving):
                guessing = True
        if ahead and guessing:
            return []
        drafts = Drafts()
        if repeats == 1 and not behind:  # a prompt's tokens are worth more than guesses
            if ahead and self._speculation.holds_back(model, decodes):
                return []
            drafts = self._speculation.drafts_for(model, decodes, self._config.token_budget - len(decodes))
        scheduled = self._schedule_decodes(decodes, allowed, now, repeats, drafts)
        # taking blocks for those may have ended the turn of others
        behind = [(seq, count) for seq, count in behind if seq.num_pending_tokens]
        if behind or self._fair.saves:
            scheduled += self._schedule_prompts(behind, scheduled, model, now)
        return scheduled

    def wait_s(self, now: float) -> float:
        """See `Batcher.wait_s`."""
        return self._policy.wait_s(now)

    def _schedule_decodes(
        self, seqs: list[Sequence], allowed: _Lazily, now: float, repeats: int, drafts: Drafts
    ) -> list[ScheduledSequence]:
        seqs.sort(key=urgency)
        scheduled = []
        for seq in seqs:
            if not seq.covers(seq.num_computed_tokens + 1):
                # its turn may not come: one before may have needed its blocks, or nobody has any for it
                if seq.num_pending_tokens != 1 or not self._room.grows(seq, allowed()):
                    continue
            elif seq.leaving or seq.preempted:
                continue
            draft = drafts.get(seq.spec.seq_id, ())
            if draft:  # as far as there are blocks that nobody else needs
                draft = draft[: self._room.reach((seq,), 1 + len(draft)) - 1]
            scheduled.append(seq.schedule(1, now, repeats, draft))
        return scheduled

    def _schedule_prompts(
        self, behind: Seq[tuple[Sequence, int]], decodes: Seq[ScheduledSequence], model: StepTimeModel, now: float
    ) -> list[ScheduledSequence]:
        config = self._config
        budget = config.token_budget if decodes else max(config.token_budget, config.lone_token_budget)
        chunk_size = config.chunk_size or budget
        wants = _wants(least_first(behind), chunk_size)
        shares = self._fair.share(wants, self._prompt_budget(model, budget - len(decodes), decodes, wants))
        count_overtaking(behind, shares)
        return [self._sequences[seq_id].schedule(count, now) for seq_id, count in shares.items()]

    def _prompt_budget(
        self, model: StepTimeModel, most: int, decodes: Seq[ScheduledSequence], wants: Seq[PrefillWant]
    ) -> int:
        if not (wants and decodes):
            return most
        context = sum(row.start + 1 for row in decodes)
        start = max(self._sequences[want.seq_id].num_computed_tokens for want in wants)
        target = self._config.itl_target
        return prompt_budget(model, target, most, len(decodes), len(wants), context, start)

    def _allowed(self, now: float) -> Collection[str]:
        """Who may run by the batching policy."""
        live = {i for i, seq in self._sequences.items() if not (seq.finish or seq.spec.compute_only)}
        ready = [i for i in self._sequences if i in live and not self._sequences[i].awaiting_kv]
        return frozenset(self._policy.admit(ready, live, now))


class _Lazily:
    """Who may run by the batching policy: found when somebody asks, which in most steps nobody does."""

    def __init__(self, find: Callable[[float], Collection[str]], now: float) -> None:
        self._find, self._now = find, now
        self._found: Collection[str] | None = None

    def __call__(self) -> Collection[str]:
        if self._found is None:
            self._found = self._find(self._now)
        return self._found


def _wants(behind: Seq[tuple[Sequence, int]], chunk_size: int) -> list[PrefillWant]:
    """What of each sequence a step could compute, in this order. Those that are scored share SCORED_CHUNK, tenants
    evenly: else the short prompts of one would keep another's out of every step."""
    scored = {seq.spec.tenant for seq, _ in behind if seq.spec.num_scored}
    left = dict.fromkeys(scored, max(1, SCORED_CHUNK // max(1, len(scored))))
    wants = list[PrefillWant]()
    for seq, count in behind:
        tenant, most = seq.spec.tenant, min(count, chunk_size)
        if seq.spec.num_scored:
            most = min(most, left[tenant])
            left[tenant] -= most
        if most:
            wants.append(PrefillWant(seq.spec.seq_id, tenant, seq.spec.weight, most))
    return wants
