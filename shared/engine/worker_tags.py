"""Which completed blocks get which tags: known ones at once, the others when the index has extended the chain. Pure.

Workers know tags, not keys. A chain goes on only from its last known tag, so each sequence has at most one run per
layer group with the index at a time; blocks that complete meanwhile wait. A preempted sequence completes blocks anew:
the newer copy of a position counts. An index that does not know the last tag, as
after its restart, is sent the whole prefix once; any other refusal ends the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contracts.attempt import Attempt
from shared.contracts.errors import from_wire
from shared.contracts.grants import SignedGrant
from shared.contracts.ids import BlockGeneration, BlockTag
from shared.contracts.parts import BlockRef, ExtendedRun, ExtendRun, GroupTags
from shared.contracts.tokens import pack_tokens
from shared.engine.sequence_update import CompletedBlock

UNKNOWN_PARENT = "unknown_parent"
"""The index's error code: it does not know the tag that a run is to follow."""


@dataclass(frozen=True, slots=True)
class Tagging:
    """Make a block findable, if it still is of this generation."""

    group: int
    block: CompletedBlock
    tag: BlockTag


@dataclass(slots=True)
class _Chain:
    """One sequence's chain in one group: `known` tags from position 0, then blocks that wait for theirs."""

    known: list[BlockTag]
    waiting: list[CompletedBlock] = field(default_factory=list)
    asked: list[CompletedBlock] = field(default_factory=list)
    extended_ids: list[int] = field(default_factory=list)  # tokens of the blocks whose tags came by `extended`
    whole: bool = False  # the next run, or the one asked, starts at position 0
    broken: bool = False  # a tag is missing in the middle: nothing behind it can be tagged

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.asked

    def wait(self, block: CompletedBlock) -> None:
        """Keep a block for the next run. What stands behind its position was completed before and lost since."""
        self.waiting = [b for b in self.waiting if b.position < block.position]
        self.waiting.append(block)

    def take_known(self) -> list[CompletedBlock]:
        """Blocks that wait, and whose tags have come for an older copy of them."""
        known = [b for b in self.waiting if b.position < len(self.known)]
        self.waiting = [b for b in self.waiting if b.position >= len(self.known)]
        return known


@dataclass(slots=True)
class _Entry:
    attempt: Attempt
    grant: SignedGrant
    token_ids: Sequence[int]  # that it came with
    chains: list[_Chain]
    closed: bool = False

    def leading_ids(self, chain: _Chain, block_size: int) -> list[int] | None:
        """Tokens of the blocks whose tags are known; None when they are not all at hand."""
        num_tokens = len(chain.known) * block_size
        token_ids = [*self.token_ids[: num_tokens - len(chain.extended_ids)], *chain.extended_ids]
        return token_ids if len(token_ids) == num_tokens else None


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run to be sent to the index, and whose it is."""

    seq_id: str
    group: int
    run: ExtendRun


class TagChains:
    """The chains of every sequence whose blocks may be cached."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(
        self, seq_id: str, attempt: Attempt, grant: SignedGrant, tags: Sequence[GroupTags], token_ids: Sequence[int]
    ) -> None:
        """Begin a sequence of `token_ids` whose leading full blocks have these tags."""
        chains = [_Chain([]) for _ in range(self._num_groups)]
        for group in tags:
            if 0 <= group.group < self._num_groups:
                chains[group.group].known = list(group.tags)
        self._entries[seq_id] = _Entry(attempt, grant, token_ids, chains)

    def completed(self, seq_id: str, blocks: Sequence[Sequence[CompletedBlock]], ask: bool = True) -> list[Tagging]:
        """Blocks became full and final: those whose tag is known. The others wait for the index if `ask`."""
        entry = self._entries.get(seq_id)
        if entry is None:
            return []
        taggings: list[Tagging] = []
        for group, (chain, new) in enumerate(zip(entry.chains, blocks, strict=True)):
            for block in new:
                if block.position < len(chain.known):
                    taggings.append(Tagging(group, block, chain.known[block.position]))
                elif ask and not chain.broken:
                    chain.wait(block)
        return taggings

    def close(self, seq_id: str) -> None:
        """No more blocks will complete; those that wait may still get their tags."""
        entry = self._entries.get(seq_id)
        if entry is not None:
            entry.closed = True
            self._drop_if_over(seq_id, entry)

    def forget(self, seq_id: str) -> None:
        """None of its blocks is to be tagged any more, those that wait included."""
        self._entries.pop(seq_id, None)

    def take_runs(self) -> list[AskedRun]:
        """Runs to ask the index for, each to be answered by `extended` or `failed`."""
        runs: list[AskedRun] = []
        for seq_id, entry in self._entries.items():
            for group, chain in enumerate(entry.chains):
                if not chain.waiting or chain.asked:
                    continue
                if chain.waiting[0].position != len(chain.known):
                    chain.broken, chain.waiting = True, []
                    continue
                leading = entry.leading_ids(chain, len(chain.waiting[0].token_ids)) if chain.whole else []
                if leading is None:
                    chain.broken, chain.waiting = True, []
                    continue
                chain.asked, chain.waiting = chain.waiting, []
                runs.append(AskedRun(seq_id, group, _run(entry, chain, group, leading)))
        for seq_id, entry in tuple(self._entries.items()):
            self._drop_if_over(seq_id, entry)
        return runs

    def extended(self, asked: AskedRun, answer: ExtendedRun) -> list[Tagging]:
        """The index's tags for one run. A refused run ends its chain, unless the whole prefix is still to be tried."""
        entry = self._entries.get(asked.seq_id)
        if entry is None:
            return []
        chain = entry.chains[asked.group]
        blocks, chain.asked = chain.asked, []
        taggings: list[Tagging] = []
        if answer.error is not None and from_wire(answer.error).code == UNKNOWN_PARENT and not chain.whole:
            again, chain.waiting, chain.whole = chain.waiting, blocks, True
            for block in again:
                chain.wait(block)
        elif answer.error is not None or len(answer.tags) != len(asked.run.blocks):
            chain.broken, chain.waiting = True, []
        else:
            chain.known = list(answer.tags) if chain.whole else chain.known + list(answer.tags)
            chain.extended_ids += [t for block in blocks for t in block.token_ids]
            chain.whole = False
            new = answer.tags[-len(blocks) :]
            taggings = [Tagging(asked.group, b, t) for b, t in zip(blocks, new, strict=True)]
            taggings += [Tagging(asked.group, b, chain.known[b.position]) for b in chain.take_known()]
        self._drop_if_over(asked.seq_id, entry)
        return taggings

    def failed(self, asked: AskedRun) -> None:
        """The index did not answer: the run waits for the next turn, unless its sequence is over."""
        entry = self._entries.get(asked.seq_id)
        if entry is None:
            return
        chain = entry.chains[asked.group]
        again, chain.waiting, chain.asked = chain.waiting, chain.asked, []
        for block in again:
            chain.wait(block)
        if entry.closed:
            del self._entries[asked.seq_id]

    def _drop_if_over(self, seq_id: str, entry: _Entry) -> None:
        if entry.closed and all(chain.idle for chain in entry.chains):
            self._entries.pop(seq_id, None)


def _run(entry: _Entry, chain: _Chain, group: int, leading: Sequence[int]) -> ExtendRun:
    """The blocks asked about, behind the last known tag or, with the known blocks' tokens, from position 0."""
    refs = [BlockRef(b.block_id, b.generation) for b in chain.asked]
    parent = chain.known[-1] if chain.known else BlockTag(b"")
    if chain.whole:
        refs = [BlockRef(-1, BlockGeneration(0))] * len(chain.known) + refs
        parent = BlockTag(b"")
    return ExtendRun(
        attempt=entry.attempt,
        group=group,
        grant=entry.grant,
        token_ids=pack_tokens([*leading, *(t for block in chain.asked for t in block.token_ids)]),
        blocks=tuple(refs),
        parent=parent,
    )
