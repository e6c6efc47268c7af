"""What a decode worker refuses before it asks its batcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.decode.reserving import beyond_plain, require_sane
from shared.contracts.errors import ContextExceeded, InvalidInput
from shared.contracts.ids import Term, WorkerId
from shared.contracts.messages import Reserve
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.engine.worker_engine import WorkerFacts
from shared.engine.worker_fake import open_fake
from tests.pipeline.worker_support import INGRESS, attempt, options, signed_grant, verify

PLAIN = SamplingParams(max_tokens=4, temperature=0.5, top_k=3, top_p=0.9, seed=1, ignore_eos=True, stop_token_ids=(5,))
BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("min_p", {"min_p": 0.1}),
    ("presence_penalty", {"presence_penalty": -1.0}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("logit_bias", {"logit_bias": ((5, 1.0),)}),
    ("min_tokens", {"min_tokens": 2}),
    ("logprobs", {"logprobs": 0}),
    ("logprobs", {"prompt_logprobs": 0}),
]


def test_every_parameter_is_plain_or_named() -> None:
    assert beyond_plain(PLAIN) == ""
    for name, changes in BEYOND:
        assert beyond_plain(msgspec.structs.replace(PLAIN, **changes)) == name
    known = {"max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop_token_ids", "grammar"}
    assert known | {key for _, changes in BEYOND for key in changes} == set(SamplingParams.__struct_fields__)


@pytest.fixture
def facts(tmp_path: Path) -> WorkerFacts:
    core = open_fake(replace(options(tmp_path), kv_dir=tmp_path), WorkerId("decode-1"))
    core.pool.close()
    return core.facts


def test_a_plain_sampler_refuses_by_name(facts: WorkerFacts) -> None:
    def reserve(sampling: SamplingParams) -> Reserve:
        return Reserve(
            attempt=attempt("req-a"),
            term=Term(1),
            ingress_id=INGRESS,
            grant=signed_grant("req-a"),
            token_ids=pack_tokens([1, 2, 3]),
            num_prompt_tokens=3,
            sampling=(sampling,),
        )

    plain = replace(facts, samples_plainly=True)
    grant = verify(signed_grant("req-a"))
    require_sane(reserve(PLAIN), grant, plain)
    biased = reserve(msgspec.structs.replace(PLAIN, logit_bias=((5, 1.0),)))
    require_sane(biased, grant, facts)
    with pytest.raises(InvalidInput) as caught:
        require_sane(biased, grant, plain)
    assert (caught.value.param, caught.value.status) == ("logit_bias", 400)
    with pytest.raises(ContextExceeded):
        require_sane(reserve(msgspec.structs.replace(PLAIN, max_tokens=10**6)), grant, facts)
