"""Which sequences speculate, and with what: a draft of each one's next tokens, verified by its next step. Pure.

A row of logits draws with the noise of its own position, so a drafted token counts exactly if the row before it draws
it; what is drafted decides how many tokens a step yields and nothing else. A draft needs to know the last token: while
someone hopes to draft, no step is planned ahead of the one in flight.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter

from shared.contracts.tokens import unpack_tokens
from shared.engine.draft_costs import DraftCosts
from shared.engine.draft_length import Draftable, draft_lengths
from shared.engine.draft_record import DraftRecord
from shared.engine.prompt_lookup import Found, PromptLookup
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepTimeModel, context_of

READ_AT_ONCE = 2048
"""Tokens of all texts together that are indexed between two steps, about a millisecond. Those that lack least come
first, so that a long text costs others no drafts; it is complete some steps later."""

Drafts = dict[str, tuple[int, ...]]
"""Per sequence the tokens drafted behind its last one."""


_NOTHING = Found((), 0)


@dataclass(slots=True)
class _Writer:
    """A sequence that may speculate."""

    lookup: PromptLookup
    record: DraftRecord = field(default_factory=DraftRecord)
    draft: Found = _NOTHING  # the one in flight, before it was cut


class Speculation:
    """The drafts of one batcher.

    Args:
        most: drafted tokens of a sequence in a step; 0: nobody speculates.

    Attributes:
        drafts, drafted, accepted: so far: drafts verified, their tokens, and those of them that were right.
    """

    def __init__(self, most: int) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self._most = most
        self._costs = DraftCosts()
        self._writers: dict[str, _Writer] = {}

    def holds_back(self, model: StepTimeModel, decodes: Seq[Sequence]) -> bool:
        """True when nothing is to be planned ahead for `decodes`: one of them may have a draft once its last token is
        known."""
        return bool(self._most) and self._pays(model, decodes, [seq for seq in decodes if self._hopes(seq)])

    def most_steps(self, model: StepTimeModel, decodes: Seq[Sequence], most: int) -> int:
        """Steps, at most so many, that all of `decodes` may go through before one of them looks for a draft."""
        able = [seq for seq in decodes if self._able(seq)] if self._most else []
        if not self._pays(model, decodes, able):
            return most
        return max(1, min(most, *(self._writer(seq).record.resumes_at - len(seq.tokens) for seq in able)))

    def drafts_for(self, model: StepTimeModel, decodes: Seq[Sequence], most: int) -> Drafts:
        """Drafts for a step of `decodes`, so long as pays best, and at most so many tokens in all."""
        hopeful = [seq for seq in decodes if self._hopes(seq) and not seq.num_placeholders] if self._most else []
        if not self._pays(model, decodes, hopeful):
            return {}
        self._read(hopeful)
        found = [(seq, draft) for seq in hopeful if (draft := self._found(seq)) is not None]
        wants = [_want(seq, self._writer(seq).record.chance(d.match), len(d.token_ids)) for seq, d in found]
        lengths = self._lengths(model, wants, decodes, most)
        drafts = Drafts()
        for (seq, draft), length in zip(found, lengths, strict=True):
            writer = self._writer(seq)
            if length:
                writer.draft = draft
                drafts[seq.spec.seq_id] = draft.token_ids[:length]
            else:
                writer.record.does_not_pay(draft.match, len(seq.tokens))
        return drafts

    def verified(self, seq: Sequence, drafted: int, accepted: int, at: int) -> None:
        """A step has verified a draft of the sequence: its first `accepted` tokens, from position `at` on, were right
        and are text now."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        seq.num_verified += drafted
        seq.num_accepted += accepted
        writer = self._writer(seq)
        writer.record.verified(writer.draft.match, drafted, accepted, at)
        if writer.draft.predicted:
            seq.num_predicted += drafted
            seq.predicted_right += range(at, at + accepted)

    def took(self, plan: StepPlan, output: StepOutput, model: StepTimeModel) -> None:
        """A step has ended: what it took is kept in mind."""
        verifies = any(row.drafted for row in plan.sequences)
        if self._most and (verifies or plan.num_tokens == len(plan.sequences)):
            predicted_s = model.predict(plan.num_tokens, len(plan.sequences), context_of(plan))
            self._costs.took(verifies, output.duration_s / output.repeats, predicted_s)

    def forget(self, seq_id: str) -> None:
        """The sequence is over."""
        self._writers.pop(seq_id, None)

    def _writer(self, seq: Sequence) -> _Writer:
        writer = self._writers.get(seq.spec.seq_id)
        if writer is None:
            prediction = unpack_tokens(seq.spec.sampling.prediction)
            writer = self._writers[seq.spec.seq_id] = _Writer(PromptLookup(prediction))
        return writer

    def _able(self, seq: Sequence) -> bool:
        return seq.most_drafts > 0

    def _hopes(self, seq: Sequence) -> bool:
        return self._able(seq) and len(seq.tokens) + seq.num_placeholders >= self._writer(seq).record.resumes_at

    def _pays(self, model: StepTimeModel, decodes: Seq[Sequence], drafting: Seq[Sequence]) -> bool:
        """Whether the best drafts these may come to have would pay beside `decodes`."""
        if not drafting:
            return False
        wants = [_want(seq, self._writer(seq).record.best_chance, min(self._most, seq.most_drafts)) for seq in drafting]
        return any(self._lengths(model, wants, decodes, self._most * len(wants)))

    def _lengths(self, model: StepTimeModel, wants: Seq[Draftable], decodes: Seq[Sequence], most: int) -> list[int]:
        context = sum(seq.num_computed_tokens + 1 for seq in decodes)
        return draft_lengths(model, wants, len(decodes), context, most, self._costs.dearer)

    def _read(self, seqs: Seq[Sequence]) -> None:
        """Take in what their texts have grown by, READ_AT_ONCE tokens at most."""
        left = READ_AT_ONCE
        unread = [(self._writer(seq).lookup.num_unread(len(seq.tokens)), seq) for seq in seqs]
        for count, seq in sorted(unread, key=itemgetter(0)):
            if count and left:
                self._writer(seq).lookup.read(seq.tokens, left)
                left -= min(count, left)

    def _found(self, seq: Sequence) -> Found | None:
        writer, at = self._writer(seq), len(seq.tokens)
        if writer.lookup.num_unread(at):
            return None
        found = writer.lookup.find(min(self._most, seq.most_drafts), seq.num_output_tokens)
        if found is None:
            writer.record.found_nothing(at)
        return found


def _want(seq: Sequence, chance: float, most: int) -> Draftable:
    return Draftable(chance, most, seq.num_computed_tokens + 1)
