"""Tag chains: known tags at once, unknown ones through the index, one run at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.grants import SignedGrant
from shared.contracts.ids import BlockGeneration, BlockTag, Dispatch, Epoch, RequestId
from shared.contracts.parts import ExtendedRun, GroupTags
from shared.contracts.tokens import unpack_tokens
from shared.engine.sequence_update import CompletedBlock
from shared.engine.worker_tags import AskedRun, TagChains, Tagging

ATTEMPT = Attempt(RequestId("req-a"), Epoch(1), Dispatch(1))
GRANT = SignedGrant(b"", b"")


def tag(i: int) -> BlockTag:
    return BlockTag(bytes([i]) * 16)


def block(position: int) -> CompletedBlock:
    return CompletedBlock(position, 50 + position, BlockGeneration(1), (position, position))


def opened(known: int) -> TagChains:
    chains = TagChains(1)
    chains.open("s", ATTEMPT, GRANT, [GroupTags(0, tuple(tag(i) for i in range(known)))], [])
    return chains


def test_known_tags_are_applied_at_once() -> None:
    chains = opened(2)
    assert chains.completed("s", [[block(0), block(1)]]) == [Tagging(0, block(0), tag(0)), Tagging(0, block(1), tag(1))]
    assert chains.take_runs() == []


def test_further_blocks_extend_from_the_last_tag_one_run_at_a_time() -> None:
    chains = opened(1)
    assert chains.completed("s", [[block(1), block(2)]]) == []
    (asked,) = chains.take_runs()
    assert (asked.run.parent, len(asked.run.blocks)) == (tag(0), 2)
    chains.completed("s", [[block(3)]])
    assert chains.take_runs() == [], "one run is with the index"
    tagged = chains.extended(asked, ExtendedRun(tags=(tag(1), tag(2))))
    assert tagged == [Tagging(0, block(1), tag(1)), Tagging(0, block(2), tag(2))]
    (asked,) = chains.take_runs()
    assert asked.run.parent == tag(2)


def test_without_tags_the_chain_starts_at_position_0() -> None:
    chains = opened(0)
    chains.completed("s", [[block(0)]])
    assert chains.take_runs()[0].run.parent == b""


def test_a_hole_ends_the_chain() -> None:
    chains = opened(0)
    chains.completed("s", [[block(3)]])
    assert chains.take_runs() == []
    chains.completed("s", [[block(4)]])
    assert chains.take_runs() == []


def test_tags_that_come_behind_a_purge_are_not_applied() -> None:
    chains = opened(1)
    chains.completed("s", [[block(1)]])
    (asked,) = chains.take_runs()
    chains.completed("s", [[block(2)]])
    chains.forget("s")
    assert chains.extended(asked, ExtendedRun(tags=(tag(1),))) == []
    chains.failed(asked)
    assert chains.take_runs() == []
    assert len(chains) == 0


def test_a_refused_run_ends_the_chain_and_a_lost_one_waits() -> None:
    chains = opened(1)
    chains.completed("s", [[block(1)]])
    (asked,) = chains.take_runs()
    chains.failed(asked)
    (asked,) = chains.take_runs()
    assert chains.extended(asked, ExtendedRun(error=ErrorInfo("Forbidden/x", "no"))) == []
    chains.completed("s", [[block(2)]])
    assert chains.take_runs() == []


def test_closed_chains_are_forgotten_when_nothing_waits() -> None:
    chains = opened(1)
    chains.completed("s", [[block(1)]])
    chains.close("s")
    (asked,) = chains.take_runs()
    assert len(chains) == 1
    assert chains.extended(asked, ExtendedRun(tags=(tag(1),))) == [Tagging(0, block(1), tag(1))]
    assert len(chains) == 0
    chains.open("t", ATTEMPT, GRANT, [], [])
    chains.completed("t", [[block(0)]])
    chains.close("t")
    (asked,) = chains.take_runs()
    chains.failed(asked)
    assert len(chains) == 0


def again(position: int) -> CompletedBlock:
    """The block of a position, computed anew after a preemption."""
    return replace(block(position), block_id=90 + position)


def test_a_preempted_sequence_completes_blocks_anew_and_its_chain_goes_on() -> None:
    # Given blocks 1 and 2 with the index, and 3 waiting, when the sequence is preempted and computes them again
    chains = opened(1)
    chains.completed("s", [[block(1), block(2)]])
    (asked,) = chains.take_runs()
    chains.completed("s", [[block(3)]])
    for position in (1, 2, 3, 4):
        chains.completed("s", [[again(position)]])
    # Then the tags that come serve both copies, and the newer ones of the others are asked for
    both = [Tagging(0, make(i), tag(i)) for make in (block, again) for i in (1, 2)]
    assert chains.extended(asked, ExtendedRun(tags=(tag(1), tag(2)))) == both
    (asked,) = chains.take_runs()
    assert [b.block_id for b in asked.run.blocks] == [93, 94]
    assert asked.run.parent == tag(2)


@pytest.mark.parametrize("answered", [False, True])
def test_a_run_that_failed_is_asked_for_once_with_the_newer_copies(answered: bool) -> None:
    chains = TagChains(1)
    chains.open("s", ATTEMPT, GRANT, [GroupTags(0, (tag(0),))], [0, 0, 1])
    chains.completed("s", [[block(1), block(2)]])
    (asked,) = chains.take_runs()
    chains.completed("s", [[again(1)]])
    if answered:
        assert chains.extended(asked, UNKNOWN) == []
        (asked,) = chains.take_runs()
        assert asked.run.parent == b""
    else:
        chains.failed(asked)
        (asked,) = chains.take_runs()
    assert asked.run.blocks[-1].block_id == 91


def test_prefill_asks_for_nothing() -> None:
    chains = opened(1)
    chains.completed("s", [[block(1)]], ask=False)
    assert chains.take_runs() == []


UNKNOWN = ExtendedRun(error=ErrorInfo("Conflict/unknown_parent", "send the whole prefix"))


def asked_behind_an_unknown_parent() -> tuple[TagChains, AskedRun]:
    """Two known blocks, one tagged by the index since, one more that a restarted index refuses."""
    chains = TagChains(1)
    chains.open("s", ATTEMPT, GRANT, [GroupTags(0, (tag(0), tag(1)))], [0, 0, 1, 1, 2])
    chains.completed("s", [[block(2)]])
    (asked,) = chains.take_runs()
    chains.extended(asked, ExtendedRun(tags=(tag(2),)))
    chains.completed("s", [[block(3)]])
    (asked,) = chains.take_runs()
    assert chains.extended(asked, UNKNOWN) == []
    (asked,) = chains.take_runs()
    return chains, asked


def test_an_index_that_does_not_know_the_parent_is_sent_the_whole_prefix() -> None:
    chains, asked = asked_behind_an_unknown_parent()
    assert asked.run.parent == b""
    assert unpack_tokens(asked.run.token_ids) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [b.block_id for b in asked.run.blocks] == [-1, -1, -1, 53]
    tags = tuple(tag(i) for i in range(4))
    assert chains.extended(asked, ExtendedRun(tags=tags)) == [Tagging(0, block(3), tag(3))]
    chains.completed("s", [[block(4)]])
    (asked,) = chains.take_runs()
    assert (asked.run.parent, len(asked.run.blocks)) == (tag(3), 1)
    chains.extended(asked, UNKNOWN)
    (asked,) = chains.take_runs()
    assert len(asked.run.blocks) == 5, "it may be restarted again"


def test_the_whole_prefix_is_sent_once() -> None:
    chains, asked = asked_behind_an_unknown_parent()
    assert chains.extended(asked, UNKNOWN) == []
    chains.completed("s", [[block(4)]])
    assert chains.take_runs() == []


def test_a_prefix_that_is_not_at_hand_ends_the_chain() -> None:
    chains = opened(2)
    chains.completed("s", [[block(2)]])
    (asked,) = chains.take_runs()
    chains.extended(asked, UNKNOWN)
    assert chains.take_runs() == []
    chains.close("s")
    assert len(chains) == 0
