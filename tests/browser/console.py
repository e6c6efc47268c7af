"""The console as a user handles it."""

from __future__ import annotations

from dataclasses import dataclass

from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Watch

FOCUSED = "document.activeElement"


@dataclass
class Console:
    """One tab at one gateway."""

    page: Page
    url: str

    def open(self, hash_: str = "") -> None:
        self.page.goto(f"{self.url}/console{hash_}")

    def sign_in(self, key: str, hash_: str = "") -> None:
        """Open the page and give the key."""
        self.open(hash_)
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("button", name="Sign out").wait_for()

    def go(self, view: str) -> None:
        self.page.get_by_role("navigation").get_by_role("link", name=view).click()
        self.page.get_by_role("heading", level=1).wait_for()

    def send(self, text: str, max_tokens: int = 8) -> Locator:
        """Ask in the chat; the new turn."""
        before = self.page.get_by_role("article").count()
        self.page.get_by_label("Max tokens").fill(str(max_tokens))
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()
        turn = self.page.get_by_role("article").nth(before)
        turn.wait_for()
        return turn

    def complete(self, turn: Locator) -> None:
        """Wait for a turn's end."""
        expect(turn.get_by_role("link", name="Trace")).to_be_visible()

    def focused(self) -> str:
        """What has the focus, in words."""
        words: str = self.page.evaluate(f"{FOCUSED}.ariaLabel || ({FOCUSED}.labels?.[0] || {FOCUSED}).textContent")
        return words.strip()

    def focus_is_visible(self) -> bool:
        """What has the focus is on the screen, with an outline around it."""
        visible: bool = self.page.evaluate(
            f"getComputedStyle({FOCUSED}).outlineStyle !== 'none' && {FOCUSED}.getBoundingClientRect().right > 0"
        )
        return visible

    def tab_to(self, words: str, limit: int = 30) -> None:
        """Press Tab until what has the focus is called `words`; each stop on the way must be visible."""
        for _ in range(limit):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(f"{FOCUSED} === document.body"):
                continue  # past the last stop, before the first
            assert self.focus_is_visible(), self.focused()
            if words in self.focused():
                return
        raise AssertionError(f"Tab does not reach {words!r}")

    def widest(self) -> int:
        """Pixels the page is wide, what sticks out of it included."""
        right: int = self.page.evaluate(
            """() => Math.max(document.documentElement.scrollWidth,
                ...[...document.querySelectorAll('header *, main *')]
                .filter((one) => !one.closest('thead'))
                .map((one) => Math.ceil(one.getBoundingClientRect().right)))"""
        )
        return right


def console(page: Page, watch: Watch, url: str) -> Console:
    """A console whose tab may ask nobody but `url`."""
    watch.host = url.removeprefix("http://")
    return Console(page, url)
