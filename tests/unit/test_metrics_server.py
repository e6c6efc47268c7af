"""The metrics' listener: one answer a connection, everything bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import httpx
import pytest

from services.cli.status import told
from services.cli.topology import metrics_ports
from shared.contracts.errors import SettingsError
from shared.lifecycle.ready import report_ready
from shared.settings.sections import MetricsSettings, Settings
from shared.telemetry import metrics_server
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import metrics_url, serve_metrics

METRICS = Metrics("scheduler", models=["m"])


async def raw(port: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_scrapes_and_what_is_no_scrape() -> None:
    async with serve_metrics(METRICS, "127.0.0.1", 0) as port, httpx.AsyncClient() as client:
        url = metrics_url("0.0.0.0", port)
        found = await client.get(url, params={"x": "1"})
        assert (found.status_code, found.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert "baton_leader_term 0.0" in found.text
        assert (await client.get(url, headers={"Accept": "application/openmetrics-text"})).text.endswith("# EOF\n")
        head = await client.head(url)
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 404
        assert (await client.post(url, content=b"x")).status_code == 405


@pytest.mark.parametrize("head", [b"GET", b"\r\n\r\n", b"\x00\xff\r\n\r\n", b"GET /metrics\r\n\r\n", b"x" * 100_000])
async def test_nonsense_costs_its_own_connection_only(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "ANSWER_S", 0.3)
    async with serve_metrics(METRICS, "127.0.0.1", 0) as port:
        with contextlib.suppress(ConnectionError):
            answer = await raw(port, head)
            assert not answer or answer.startswith(b"HTTP/1.1 ")
        assert (await raw(port, b"GET /metrics HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")


async def test_silent_connections_are_cut_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "ANSWER_S", 0.5)
    async with serve_metrics(METRICS, "127.0.0.1", 0) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(metrics_server.MAX_CONNECTIONS + 4)]
        ends = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in silent)), 10)
        assert set(ends) == {b""}
        for _, writer in silent:
            writer.close()
        assert (await raw(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")


async def test_a_port_that_is_taken_is_a_wrong_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"metrics on 127.0.0.1 port {port}") as caught:
            async with serve_metrics(METRICS, "127.0.0.1", port):
                pass
        assert caught.value.param == "metrics.port"


async def test_a_successor_may_have_the_same_port_for_a_while() -> None:
    async with serve_metrics(METRICS, "127.0.0.1", 0) as free:
        pass
    async with serve_metrics(METRICS, "127.0.0.1", free), serve_metrics(METRICS, "127.0.0.1", free) as port:
        assert port == free
        assert (await raw(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")


def test_processes_of_one_machine_count_on_from_a_port_that_is_set() -> None:
    assert set(metrics_ports(Settings()).values()) == {0}
    ports = metrics_ports(Settings(metrics=MetricsSettings(port=9600)))
    assert sorted(ports.values()) == list(range(9600, 9600 + len(ports)))
    with pytest.raises(SettingsError, match=r"metrics\.port = 65533"):
        metrics_ports(Settings(metrics=MetricsSettings(port=65533)))


def test_status_finds_the_addresses_where_processes_told_them(tmp_path: Path) -> None:
    for name, url in (("gateway", "http://127.0.0.1:1/metrics"), ("policy", "")):
        report_ready({"BATON_READY_FILE": str(tmp_path / f"{name}.ready")}, metrics_url=url)
    assert told(tmp_path, "metrics_url") == {"gateway": "http://127.0.0.1:1/metrics"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5/metrics"),
        ("0.0.0.0", "http://127.0.0.1:5/metrics"),
        ("::", "http://[::1]:5/metrics"),
    ],
)
def test_addresses(host: str, url: str) -> None:
    assert metrics_url(host, 5) == url
