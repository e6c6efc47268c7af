"""What keys may see of traces and cluster, and the console page's files and headers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.console_files import FOLDER, read_files
from tests.pipeline.gateway_support import HEADERS, Stack, chat, gateway_stack

OTHER = {"authorization": "Bearer key-b"}
ADMIN = {"authorization": "Bearer key-admin"}


async def ask(stack: Stack, headers: dict[str, str], expect: int = 200, **more: Any) -> str:
    """Send one chat; the answer's id."""
    response = await stack.client.post("/v1/chat/completions", json=chat("hi", **more), headers=headers)
    assert response.status_code == expect
    return str(response.json().get("id", ""))


async def listed(stack: Stack, headers: dict[str, str], count: int) -> list[dict[str, Any]]:
    """The traces a key sees, once there are `count`."""
    found: list[dict[str, Any]] = []
    for _ in range(100):
        found = (await stack.client.get("/baton/traces", headers=headers)).json()["data"]
        if len(found) == count:
            break
        await asyncio.sleep(0.05)
    assert len(found) == count, found
    return found


async def test_a_tenants_key_sees_its_own_traces_and_no_others() -> None:
    async with gateway_stack() as stack:
        # Given requests of two tenants, a refused one among them
        ours, theirs = await ask(stack, HEADERS), await ask(stack, OTHER)
        await ask(stack, OTHER, expect=400, temperature=9)
        all_of_them = await listed(stack, ADMIN, 3)
        # Then each lists its own
        assert [line["tenant"] for line in await listed(stack, HEADERS, 1)] == ["tenant-a"]
        assert {line["tenant"] for line in await listed(stack, OTHER, 2)} == {"tenant-b"}
        # And finds its own by any name, but the other's by none: as if it had never been
        foreign = [theirs, *(line["trace_id"] for line in all_of_them if line["tenant"] == "tenant-b")]
        foreign += [name.removeprefix("chatcmpl-")[:8] for name in foreign]
        answers = [await stack.client.get(f"/baton/traces/{name}", headers=HEADERS) for name in [*foreign, "f" * 32]]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.json()["error"]["code"] for answer in answers}) == 1
        assert (await stack.client.get(f"/baton/traces/{ours}", headers=HEADERS)).status_code == 200
        assert (await stack.client.get(f"/baton/traces/{theirs}", headers=ADMIN)).status_code == 200
        # And the cluster is not a tenant's business
        assert (await stack.client.get("/baton/cluster", headers=HEADERS)).status_code == 403


@pytest.mark.parametrize("path", ["identity", "traces", "traces/ffff", "cluster"])
async def test_nothing_is_shown_without_a_valid_key(path: str) -> None:
    async with gateway_stack() as stack:
        await ask(stack, HEADERS)
        assert (await stack.client.get(f"/baton/{path}")).status_code == 401
        assert (await stack.client.get(f"/baton/{path}", headers={"authorization": "Bearer no"})).status_code == 401


async def test_a_key_can_ask_whose_it_is() -> None:
    async with gateway_stack() as stack:
        answer = await stack.client.get("/baton/identity", headers=HEADERS)
        assert answer.json() == {"tenant": "tenant-a", "key_id": "key-a", "admin": False}
        assert answer.headers["cache-control"] == "no-store"
        assert (await stack.client.get("/baton/identity", headers=ADMIN)).json()["admin"] is True


async def test_a_trace_comes_with_rows_and_their_reasons() -> None:
    async with gateway_stack() as stack:
        answer = await ask(stack, HEADERS)
        await listed(stack, HEADERS, 1)
        body = (await stack.client.get(f"/baton/traces/{answer}", headers=HEADERS)).json()
        root = body["rows"][0]
        assert (root["name"], root["depth"], root["start_s"]) == ("gateway.request", 0, 0.0)
        assert any("came from the cache" in sentence for sentence in root["why"])
        assert {row["span_id"] for row in body["rows"]} == {span["span_id"] for span in body["spans"]}
        assert body["length_s"] >= root["duration_s"] > 0
        assert (body["summary"]["tenant"], body["summary"]["klass"]) == ("tenant-a", "interactive")


async def test_gateways_hear_of_each_other() -> None:
    async with gateway_stack() as stack:
        found: dict[str, Any] = {}
        for _ in range(50):
            found = (await stack.client.get("/baton/cluster", headers=ADMIN)).json()
            if found["ingresses"]:
                break
            await asyncio.sleep(0.05)
        assert [(one["id"], one["kind"]) for one in found["ingresses"]] == [("gateway-1", "gateway")]
        assert found["checks"]["accepting"] is True


async def test_the_page_keeps_itself_to_itself() -> None:
    async with gateway_stack() as stack:
        page = await stack.client.get("/console")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        # Every file of it comes with the same headers
        for path in ("console.css", "app.js", "vendor/preact.js", "icon.svg", "vendor/LICENSE.htm"):
            answer = await stack.client.get(f"/console/{path}")
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == policy
        assert (await stack.client.get("/console/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"


async def test_a_page_that_is_known_is_not_sent_again() -> None:
    async with gateway_stack() as stack:
        first = await stack.client.get("/console")
        again = await stack.client.get("/console", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await stack.client.head("/console")
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    "path",
    ["/console/no.js", "/console/vendor", "/console/%2e%2e/app.py", "/console/..%2fapp.py", "/console//etc/passwd"],
)
async def test_nothing_but_the_pages_files_is_served(path: str) -> None:
    async with gateway_stack() as stack:
        answer = await stack.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_a_browser_at_the_root_is_sent_to_the_page_and_a_program_is_not() -> None:
    async with gateway_stack() as stack:
        browser = await stack.client.get("/", headers={"accept": "text/html,application/xhtml+xml"})
        assert (browser.status_code, browser.headers["location"]) == (307, "console")
        assert (await stack.client.get("/")).status_code == 404
        for path in ("/console/", "/console/index.html"):
            assert (await stack.client.get(path)).headers["location"] == "../console"


def test_the_page_asks_nothing_of_strangers_and_holds_nothing_inline() -> None:
    # Given every file but the libraries
    texts = {name: (FOLDER / name).read_text() for name in read_files() if not name.startswith("vendor/")}
    assert {"index.html", "app.js", "console.css"} <= texts.keys()
    for name, text in texts.items():
        # Then none names another host, writes markup from text, or keeps anything for longer than the tab lives
        foreign = text.replace("http://www.w3.org/2000/svg", "")
        for word in ("http://", "https://", "innerHTML", "dangerouslySetInnerHTML", "localStorage", "document.cookie"):
            assert word not in foreign, f"{name}: {word}"
    assert "style=" not in texts["index.html"]
    assert "<script>" not in texts["index.html"]
