"""The wire: golden bytes, tolerance for older and newer peers, and the shape of the subjects table."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import pytest

from shared.contracts import admin_messages as am
from shared.contracts import batch_messages as b
from shared.contracts import idempotency_messages as i
from shared.contracts import messages as m
from shared.contracts import response_messages as r
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError, ErrorInfo, Internal, ProtocolError, QuotaExceeded, from_wire, to_wire
from shared.contracts.ids import Dispatch, Epoch, IngressId, RequestId, TenantId, WorkerId
from shared.contracts.message import Message, decode, encode
from shared.contracts.tokens import pack_tokens, unpack_tokens
from tests.contracts.examples import GOLDEN, example, golden, message_types

ALL = message_types()


def test_bytes_equal_the_golden_file() -> None:
    committed = json.loads(GOLDEN.read_text())
    assert golden() == committed, (
        "the wire changed: append fields with defaults, then `python -m tests.contracts.examples`"
    )


def test_every_message_class_is_in_the_table() -> None:
    defined = {
        c.__name__
        for module in (m, am, b, i, r)
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Message) and c is not Message
    }
    assert defined == {c.__name__ for c in ALL}


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_round_trip(cls: type[msgspec.Struct]) -> None:
    value = example(cls)
    assert decode(encode(value), cls) == value


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_unknown_fields_are_ignored(cls: type[msgspec.Struct]) -> None:
    raw = msgspec.msgpack.decode(encode(example(cls)))
    raw["field_of_a_later_version"] = [1, 2, 3]
    assert decode(msgspec.msgpack.encode(raw), cls) == example(cls)


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_another_message_is_refused(cls: type[msgspec.Struct]) -> None:
    raw = msgspec.msgpack.decode(encode(example(cls)))
    raw["type"] = "SomethingElse"
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(raw), cls)


def test_a_number_that_does_not_fit_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="EventsSeen does not encode"):
        encode(m.EventsSeen(number=2**64))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81", b"{}", b"\x80"])
def test_rubbish_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, m.Submit)


def test_attempts_fence_by_epoch_then_dispatch() -> None:
    def attempt(epoch: int, dispatch: int, request: str = "r") -> Attempt:
        return Attempt(RequestId(request), Epoch(epoch), Dispatch(dispatch))

    assert attempt(2, 1).fences(attempt(1, 9))
    assert attempt(1, 2).fences(attempt(1, 1))
    assert not attempt(1, 1).fences(attempt(1, 1))
    assert not attempt(1, 9).fences(attempt(2, 0))
    assert not attempt(9, 9, "other").fences(attempt(1, 1))


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 2**32 - 1]])
def test_token_ids_are_little_endian_u32(ids: list[int]) -> None:
    assert pack_tokens(ids) == b"".join(i.to_bytes(4, "little") for i in ids)
    assert unpack_tokens(pack_tokens(ids)) == ids


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["1"]])
def test_token_ids_out_of_range_are_refused(ids: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        pack_tokens(ids)


def test_token_bytes_of_odd_length_are_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_tokens(b"\x00\x00\x00")


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "A", "x" * 41, "ü"])
def test_ids_that_could_break_a_subject_are_refused(bad: str) -> None:
    with pytest.raises(ProtocolError):
        subjects.stream(IngressId(bad))
    with pytest.raises(ProtocolError):
        subjects.decode(WorkerId(bad), "reserve")
    with pytest.raises(ProtocolError):
        subjects.batch_submit(TenantId(bad))


def test_table_patterns_cover_the_built_subjects() -> None:
    built = {
        subjects.sched_submit("default"),
        subjects.sched_withdraw("default"),
        subjects.sched_beat("default"),
        subjects.gateway_event(IngressId("gw-1")),
        subjects.gateway_beat(IngressId("gw-1")),
        subjects.gateway_ask(IngressId("gw-1")),
        subjects.index_events(WorkerId("w-1")),
        subjects.index_replay(WorkerId("w-1")),
        subjects.worker_beat(WorkerId("w-1")),
        *(subjects.decode(WorkerId("w-1"), v) for v in ("reserve", "cancel", "finish", "replay", "ack", "migrate")),
        *(subjects.prefill(WorkerId("w-1"), v) for v in ("run", "cancel")),
        *(subjects.handoff(WorkerId("w-1"), v) for v in ("commit", "ack", "release")),
        subjects.stream(IngressId("gw-1")),
        subjects.trace("gateway"),
        subjects.audit("gateway"),
        subjects.batch_submit(TenantId("acme")),
        subjects.batch_results(TenantId("acme")),
        subjects.batch_done(TenantId("acme")),
        subjects.batch_item(TenantId("acme")),
        subjects.BATCH_FILES,
        subjects.BATCH_JOBS,
        subjects.POLICY_ADMIN,
        subjects.POLICY_IDEMPOTENCY,
        subjects.POLICY_RESPONSES,
        subjects.RESPONSES_ADOPT,
        subjects.POLICY_ADMIT_TENANT,
        subjects.POLICY_AUTHENTICATE,
        subjects.POLICY_ADMIT,
        subjects.POLICY_SETTLE,
        subjects.POLICY_EVENTS,
        subjects.INDEX_MATCH,
        subjects.INDEX_EXTEND,
        subjects.PURGE_ORDER,
        subjects.purge_ack("decode"),
    }

    def matches(pattern: str, subject: str) -> bool:
        a, b = pattern.split("."), subject.split(".")
        return len(a) == len(b) and all(x in ("*", y) for x, y in zip(a, b, strict=True))

    for subject in built:
        assert any(matches(h.pattern, subject) for h in subjects.HOPS), subject
    for hop in subjects.HOPS:
        assert any(matches(hop.pattern, s) for s in built), hop.name


def test_requests_have_replies_and_only_they() -> None:
    for hop in subjects.HOPS:
        assert (hop.reply is not None) == (hop.kind == "request"), hop.name
        assert hop.senders, hop.name
        assert hop.receivers, hop.name


def test_every_message_names_sender_and_receiver() -> None:
    for cls in ALL:
        assert cls.__doc__
        assert "→" in cls.__doc__ or cls is m.Refusal, cls.__name__


def test_error_classes_survive_the_wire() -> None:
    def subclasses(cls: type[BatonError]) -> list[type[BatonError]]:
        return [cls, *(s for c in cls.__subclasses__() for s in subclasses(c))]

    for cls in subclasses(BatonError)[1:]:
        if cls.__module__ != "shared.contracts.errors":
            continue
        back = from_wire(to_wire(cls("why", param="field", retry_after_s=2.0)))
        assert type(back) is cls
        assert (back.message, back.param, back.retry_after_s, back.code) == ("why", "field", 2.0, cls.default_code)


def test_an_error_of_a_later_version_becomes_internal() -> None:
    assert type(from_wire(ErrorInfo(code="NewKind/odd", message="m"))) is Internal


def test_retry_after_of_a_quota_refusal_survives() -> None:
    refusal = m.Refusal(error=to_wire(QuotaExceeded("slow down", retry_after_s=12.5)))
    assert from_wire(decode(encode(refusal), m.Refusal).error).retry_after_s == 12.5


def test_newtypes_keep_counters_apart() -> None:
    hints = typing.get_type_hints(m.Reserve)
    assert hints["term"].__name__ == "Term"
    assert typing.get_type_hints(Attempt)["epoch"].__name__ == "Epoch"
