"""Grafana's boards and Prometheus's targets name only metrics, labels and services that the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.contracts.subjects import SERVICES
from shared.telemetry.metric import Metric
from shared.telemetry.metric_names import TABLE
from tests.compose.boards import BOARDS, expressions, read_board

ROOT = Path(__file__).resolve().parents[2]
OBSERVE = ROOT / "deploy" / "observe"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())

SELECTOR = re.compile(r"\b(vllm:\w+|baton_\w+|up)\b(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
SCRAPED_LABELS = {"job", "instance", "le"}


def queries(board: dict[str, Any]) -> list[str]:
    """Every expression of a board, those of its variables included."""
    found = [expression for _, expression in expressions(board)]
    return found + [variable["definition"] for variable in board["templating"]["list"]]


def exposed() -> dict[str, Metric]:
    """Every series name Prometheus can get, and the metric it is of."""
    found: dict[str, Metric] = {}
    for metric in TABLE:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {f"{metric.exposed}{suffix}": metric for suffix in suffixes}
    return found


def unknown(expression: str) -> list[str]:
    """What an expression names that the code does not have."""
    series, faults = exposed(), list[str]()
    labels: set[str] = set(SCRAPED_LABELS)
    for name, matchers in SELECTOR.findall(expression):
        if name == "up":
            continue
        if name not in series:
            faults.append(name)
            continue
        labels |= set(series[name].labels)
        faults += [label for label in re.findall(r"(\w+)\s*[=!]~?", matchers) if label not in labels]
    for group in GROUPING.findall(expression):
        faults += [label for label in (part.strip() for part in group.split(",")) if label not in labels]
    return faults


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_name_metrics_and_labels_there_are(path: Path) -> None:
    found = queries(read_board(path))
    assert len(found) > 20
    assert {expression: unknown(expression) for expression in found if unknown(expression)} == {}
    assert all(SELECTOR.search(expression) for expression in found)


def test_a_metric_or_label_that_is_not_there_is_noticed() -> None:
    assert unknown("sum(rate(baton_handoff_bytes_total[1m]))") == []
    assert unknown("sum(rate(baton_handoff_bytes[1m]))") == ["baton_handoff_bytes"]
    assert unknown('sum by (rolle) (baton_live_workers{role="decode"})') == ["rolle"]
    assert unknown('baton_live_workers{reason="x"}') == ["reason"]


def test_the_two_boards_show_what_they_are_for() -> None:
    boards = {read_board(path)["title"]: " ".join(queries(read_board(path))) for path in BOARDS}
    wanted = {
        "Baton: serving": [
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:inter_token_latency_seconds_bucket",
            "baton_queue_delay_seconds_bucket",
            "vllm:generation_tokens_total",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        ],
        "Baton: operations": [
            "baton_handoffs_total",
            "baton_handoff_bytes_total",
            "baton_reservations_held",
            "baton_requests_refused_total",
            "baton_lease_losses_total",
            "baton_kv_headroom_bytes",
            "baton_limiter_active",
            "baton_batch_items",
        ],
    }
    assert boards.keys() == wanted.keys()
    for title, names in wanted.items():
        assert [name for name in names if name not in boards[title]] == []


def test_boards_use_the_data_source_that_is_provisioned() -> None:
    sources = yaml.safe_load((OBSERVE / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    uids = {source["uid"] for source in sources["datasources"]}
    used = {part["datasource"]["uid"] for path in BOARDS for part in read_board(path)["panels"] if "datasource" in part}
    assert used <= uids
    services = {source["url"].split("//")[1].split(":")[0] for source in sources["datasources"]}
    assert services <= COMPOSE["services"].keys()


def test_prometheus_scrapes_every_service_where_it_listens() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert sorted(found["names"]) == sorted(service.replace("-", "_") for service in SERVICES)
    for name in found["names"]:
        environment = COMPOSE["services"][name]["environment"]
        assert environment["BATON_METRICS_PORT"] == str(found["port"])
        assert environment["BATON_METRICS_HOST"] == "0.0.0.0"


def test_what_compose_mounts_for_observing_is_there() -> None:
    for name in ("prometheus", "grafana"):
        for volume in COMPOSE["services"][name]["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists(), volume
    provider = yaml.safe_load((OBSERVE / "grafana" / "provisioning" / "dashboards" / "baton.yaml").read_text())
    mounted = {volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]}
    assert {entry["options"]["path"] for entry in provider["providers"]} <= mounted
