"""What keeps a service from starting reaches whoever started it in one sentence, not as the end of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.child import ChildFailed
from services.cli.supervisor import Supervisor
from tests.unit.test_supervisor import spec

SERVICE = """
from shared.contracts.errors import SettingsError
from shared.lifecycle import runtime
async def main(_): raise SettingsError("model.safetensors: model.norm.weight: is missing")
class Outer:
    async def __aenter__(self): return None
    async def __aexit__(self, *_): return None
runtime.service_runtime = lambda service, **options: Outer()
runtime.run_service("prefill", main)
"""


async def test_a_service_that_cannot_start_says_why_in_one_sentence(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda line: None)
    with pytest.raises(ChildFailed) as caught:
        await supervisor.start([spec(tmp_path, "prefill-1", SERVICE)])
    await supervisor.stop([])
    assert caught.value.name == "prefill-1"
    assert caught.value.reason == "cannot start: model.safetensors: model.norm.weight: is missing"
    assert caught.value.tail == ""
    assert "prefill: model.safetensors" in (tmp_path / "prefill-1.log").read_text()
