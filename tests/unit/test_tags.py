"""Tags and scopes: golden vectors, and nothing that differs looks alike."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from shared.contracts.errors import Forbidden, ProtocolError
from shared.contracts.grants import Scope
from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.contracts.tokens import pack_tokens
from shared.security.canonical import encode_fields
from shared.security.scope import KvFormat, scope_id
from shared.security.tags import matchable_blocks, tag_chain

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "block_tags.json").read_text())
KEY = bytes(range(32))
FORMAT = KvFormat(fingerprint="f", model_digest="m", numerics="n", block_sizes=(32,))


def scope(tenant: str = "a", *authorization: str, generation: int = 1) -> Scope:
    return Scope(TenantId(tenant), authorization, ScopeGeneration(generation))


@pytest.mark.parametrize("vector", GOLDEN["tags"], ids=lambda v: v["name"])
def test_tags_equal_the_golden_vectors(vector: dict) -> None:
    tags = tag_chain(
        bytes.fromhex(vector["key"]),
        vector["group"],
        vector["block_size"],
        pack_tokens(vector["tokens"]),
        BlockTag(bytes.fromhex(vector["parent"])),
    )
    assert [tag.hex() for tag in tags] == vector["expected"]


@pytest.mark.parametrize("vector", GOLDEN["scopes"], ids=lambda v: v["name"])
def test_scope_ids_equal_the_golden_vectors(vector: dict) -> None:
    given = Scope(TenantId(vector["tenant"]), tuple(vector["authorization"]), ScopeGeneration(vector["generation"]))
    assert scope_id(given, FORMAT) == vector["expected"]


def test_a_chain_can_be_continued_from_any_tag() -> None:
    tokens = pack_tokens(range(100))
    whole = tag_chain(KEY, 0, 8, tokens)
    assert len(whole) == 12
    assert whole[:5] + tag_chain(KEY, 0, 8, tokens[5 * 32 :], whole[4]) == whole


def test_tags_differ_by_key_group_parent_and_every_token() -> None:
    tokens = list(range(8))
    base = tag_chain(KEY, 0, 8, pack_tokens(tokens))[0]
    others = [
        tag_chain(bytes(32), 0, 8, pack_tokens(tokens))[0],
        tag_chain(KEY, 1, 8, pack_tokens(tokens))[0],
        tag_chain(KEY, 0, 8, pack_tokens(tokens), base)[0],
    ]
    for i in range(8):
        changed = tokens.copy()
        changed[i] += 256
        others.append(tag_chain(KEY, 0, 8, pack_tokens(changed))[0])
    assert len({base, *others}) == len(others) + 1


def test_a_later_block_depends_on_every_earlier_one() -> None:
    first = tag_chain(KEY, 0, 4, pack_tokens([1, 2, 3, 4, 9, 9, 9, 9]))
    second = tag_chain(KEY, 0, 4, pack_tokens([1, 2, 3, 5, 9, 9, 9, 9]))
    assert first[1] != second[1]


def test_a_parent_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError):
        tag_chain(KEY, 0, 4, pack_tokens(range(4)), BlockTag(b"short"))
    with pytest.raises(ValueError, match="32 bytes"):
        tag_chain(b"short", 0, 4, b"")


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_a_match_leaves_the_last_token(num_tokens: int, blocks: int) -> None:
    assert matchable_blocks(num_tokens, 16) == blocks


def test_scopes_that_would_join_alike_differ() -> None:
    scopes = [
        scope("a", "b", "c"),
        scope("a", "b\0c"),
        scope("a", "bc"),
        scope("a", "b,c"),
        scope("a", "b"),
        scope("a", ""),
        scope("a"),
        scope("ab", "c"),
        scope("a\0b", "c"),
        scope("a", generation=2),
    ]
    formats = [
        FORMAT,
        KvFormat("fm", "", "n", (32,)),
        KvFormat("f", "mn", "", (32,)),
        KvFormat("f", "m", "n", (3, 2)),
        KvFormat("f", "m", "n", (16,)),
        KvFormat("f", "m", "n", ()),
    ]
    ids = [scope_id(s, f) for s, f in itertools.product(scopes, formats)]
    assert len(set(ids)) == len(ids)


def test_an_authorization_set_has_no_order() -> None:
    assert scope_id(scope("a", "x", "y"), FORMAT) == scope_id(scope("a", "y", "x", "x"), FORMAT)


def test_no_tenant_no_scope() -> None:
    with pytest.raises(Forbidden):
        scope_id(scope(""), FORMAT)


def test_fields_of_different_types_differ() -> None:
    alike = [(b"a",), ("a",), (("a",),), (97,), ("a", ""), ("", "a"), (b"", b"a"), (("a", ""),), (("", "a"),), ()]
    assert len({encode_fields(fields) for fields in alike}) == len(alike)


def test_fields_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        encode_fields((2**63,))
    with pytest.raises(TypeError):
        encode_fields((True,))
