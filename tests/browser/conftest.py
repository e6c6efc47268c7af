"""A real Chromium, a stack of fake workers, and a watch over everything a page must not do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.stack.running import OTHER_KEY, Baton, tenants_file

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 15_000
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The machine's own Chromium; nothing is downloaded."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path, browser: Browser) -> Iterator[Baton]:
    """One prefill and two decode workers that make tokens up, with a second tenant."""
    folder = tmp_path_factory.mktemp("browser")
    baton = Baton(folder / "state")
    try:
        others = tenants_file(folder / "tenants.json", [("other", OTHER_KEY)])
        baton.up("--fake", "--decode", "2", "--set", f"policy.tenants={others}")
        yield baton
        baton.down()
    finally:
        baton.kill_all()


@dataclass
class Watch:
    """What a page said to its console, and whom it asked. `expected`: words of complaints that a test causes."""

    host: str = ""
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def on_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != self.host:
            self.foreign.append(request.url)

    def check(self) -> None:
        """No error, no violated policy, no stranger asked."""
        assert [c for c in self.complaints if not any(words in c for words in self.expected)] == []
        assert self.foreign == []


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Browser, watch: Watch) -> Iterator[Page]:
    """A fresh tab, watched to its end."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.on("console", watch.on_console)
    page.on("pageerror", lambda error: watch.complaints.append(str(error)))
    page.on("request", watch.on_request)
    yield page
    context.close()
    watch.check()
