"""What a decode worker refuses before it asks its batcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.decode.reserving import require_sane
from shared.contracts.errors import ContextExceeded
from shared.contracts.ids import Term, WorkerId
from shared.contracts.messages import Reserve
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.engine.worker_engine import WorkerFacts
from shared.engine.worker_fake import open_fake
from tests.pipeline.worker_support import INGRESS, attempt, options, signed_grant, verify


@pytest.fixture
def facts(tmp_path: Path) -> WorkerFacts:
    core = open_fake(replace(options(tmp_path), kv_dir=tmp_path), WorkerId("decode-1"))
    core.pool.close()
    return core.facts


def test_what_exceeds_the_context_is_refused(facts: WorkerFacts) -> None:
    grant = verify(signed_grant("req-a"))

    def reserve(max_tokens: int) -> Reserve:
        return Reserve(
            attempt=attempt("req-a"),
            term=Term(1),
            ingress_id=INGRESS,
            grant=signed_grant("req-a"),
            token_ids=pack_tokens([1, 2, 3]),
            num_prompt_tokens=3,
            sampling=(SamplingParams(max_tokens=max_tokens),),
        )

    require_sane(reserve(facts.max_positions - 3), grant, facts)
    with pytest.raises(ContextExceeded):
        require_sane(reserve(facts.max_positions - 2), grant, facts)
