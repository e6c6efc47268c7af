"""`./baton keys terms`: what it asks of policy, and how the answer is shown."""

from __future__ import annotations

import json

import pytest

from services.cli import keys
from shared.contracts import admin_messages as am
from shared.contracts.ids import TenantId

ACME = TenantId("acme")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked; the answer is always the same tenant."""
    found: list[object] = []
    info = am.TenantInfo(ACME, (am.KeyInfo("first"),), {"max_parallel": 4}, 2, klass="analysis", weight=0.5)

    def answer(env: object, ask: object) -> am.Tenants:
        found.append(ask)
        return am.Tenants(tenants=(info,))

    monkeypatch.setattr(keys, "asked", answer)
    return found


def test_what_is_named_is_changed_and_the_rest_stays(asked: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["terms", "acme", "--weight", "0.5"]) == 0
    assert keys.main(["terms", "acme", "--class", "analysis"]) == 0
    assert keys.main(["terms", "acme"]) == 0
    assert asked == [
        am.TermsChange(tenant=ACME, weight=0.5),
        am.TermsChange(tenant=ACME, klass="analysis"),
        am.TenantsQuery(tenant=ACME),
    ]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "acme  analysis, weight 0.5, max_parallel 4, 2 running"
    assert keys.main(["terms", "acme", "--json"]) == 0
    (tenant,) = json.loads(capsys.readouterr().out)
    assert (tenant["klass"], tenant["weight"]) == ("analysis", 0.5)


@pytest.mark.parametrize("argv", [["--weight", "0"], ["--weight", "much"], ["--weight", "inf"], ["--class", "urgent"]])
def test_what_is_no_weight_or_class_is_not_asked(argv: list[str], asked: list[object]) -> None:
    with pytest.raises(SystemExit) as ended:
        keys.main(["terms", "acme", *argv])
    assert ended.value.code == 2
    assert asked == []
