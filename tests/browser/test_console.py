"""The console page in a real Chromium, on a real stack of fake workers."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Watch
from tests.browser.console import Console, console
from tests.pipeline.gateway_support import KEYS
from tests.pipeline.gateway_thread import scripted_gateway
from tests.stack.running import MODEL, OTHER_KEY, Baton

pytestmark = pytest.mark.model

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def ask(stack: Baton, key: str = "") -> str:
    """One request past the page; the answer's id without its prefix."""
    answer = stack.openai(key).completions.create(model=MODEL, prompt="Hello", max_tokens=2)
    return answer.id.removeprefix("cmpl-")


@pytest.fixture
def tab(page: Page, watch: Watch, stack: Baton) -> Console:
    return console(page, watch, stack.url)


@pytest.fixture
def admin(tab: Console, stack: Baton) -> Console:
    assert stack.record is not None
    tab.sign_in(stack.record.admin_key)
    return tab


def test_a_wrong_key_is_told_and_a_right_one_leads_to_where_the_link_pointed(
    tab: Console, watch: Watch, stack: Baton
) -> None:
    # Given a link to a request, opened by somebody who is not signed in
    assert stack.record is not None
    watch.expected.append("status of 401")
    answer = ask(stack)
    tab.open(f"#/trace/{answer}")
    box = tab.page.get_by_label("API key")
    expect(box).to_be_focused()
    # When the key is wrong, then that is said, and nothing is kept
    box.fill("sk-ключ")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("alert")).to_contain_text("It holds characters that no key has.")
    box.fill("sk-wrong")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("alert")).to_contain_text("The key is not valid.")
    assert tab.page.evaluate("sessionStorage.length") == 0
    # When it is right, then the request is shown, and the key lies in this tab's storage alone
    tab.page.get_by_label("API key").fill(stack.record.admin_key)
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(f"Request {answer[:12]}")
    kept = tab.page.evaluate("[JSON.stringify(sessionStorage), localStorage.length + document.cookie.length]")
    assert stack.record.admin_key in kept[0]
    assert kept[1] == 0
    # And signing out forgets it
    tab.page.get_by_role("button", name="Sign out").click()
    expect(tab.page.get_by_label("API key")).to_have_value("")
    assert stack.record.admin_key not in tab.page.evaluate("JSON.stringify(sessionStorage)")


def test_a_chat_streams_and_its_waterfall_tells_why(admin: Console, watch: Watch) -> None:
    watch.expected.append("status of 404")  # asked for before its spans have come, and again
    # When a question is sent, then its answer grows while it is made
    admin.go("Chat")
    expect(admin.page.get_by_text("what they answer is made up")).to_be_visible()
    turn = admin.send("Why is the sky blue?", max_tokens=60)
    answer = turn.locator(".answer")
    expect(answer).not_to_be_empty()
    early = answer.inner_text()
    expect(admin.page.get_by_role("button", name="Stop")).to_be_enabled()
    admin.complete(turn)
    assert len(answer.inner_text()) > len(early)
    # And its figures are shown
    for words in ("TTFT ", "tokens/s", "60 output tokens", "finish: length"):
        expect(turn).to_contain_text(words)
    expect(admin.page.get_by_label("Message")).to_have_value("")
    # When its trace is opened, then the spans are there with the reasons of each decision
    turn.get_by_role("link", name="Trace").click()
    falls = admin.page.get_by_label("Waterfall")
    for name in ("gateway.request", "policy.admit", "scheduler.place", "index.match", "decode.run", "policy.settle"):
        expect(falls.get_by_role("button", name=name)).to_be_visible()
    for reason in (r"admitted as interactive: \d+ tokens reserved", "chosen from 2 workers", "fake worker"):
        expect(falls.get_by_text(re.compile(reason))).to_be_visible()
    # And a span tells its facts, both estimates among them
    falls.get_by_role("button", name="scheduler.place").click()
    details = admin.page.get_by_label("Selected span")
    for fact in ("estimate local", "matched tokens", "decode worker"):
        expect(details.get_by_text(fact)).to_be_visible()
    # And the bars lie inside the axis, the root over all of it
    boxes = [bar.bounding_box() for bar in falls.locator("li .bar").all()]
    assert all(box is not None and box["width"] >= 3 for box in boxes)


def test_the_cluster_is_shown_and_kept_when_the_gateway_is_away(admin: Console, watch: Watch, stack: Baton) -> None:
    admin.go("Cluster")
    workers = admin.page.get_by_role("table", name="Workers")
    expect(workers.get_by_role("row")).to_have_count(4)
    expect(workers.get_by_role("meter")).to_have_count(3)
    for worker in stack.get("/baton/cluster")["workers"]:
        expect(workers.get_by_text(worker["id"])).to_be_visible()
    expect(admin.page.get_by_text("Ready: a request would be served now.")).to_be_visible()
    expect(admin.page.get_by_text("Queued, interactive")).to_be_visible()
    expect(admin.page.get_by_role("table", name="Gateways and batch service")).to_contain_text("gateway-")
    # When nothing answers, then that is said above the last answer
    watch.expected.append("Failed to load resource")
    admin.page.route("**/baton/cluster", lambda route: route.abort())
    expect(admin.page.get_by_role("alert")).to_contain_text("The gateway does not answer.")
    expect(workers.get_by_role("row")).to_have_count(4)
    # When it is back, then the page goes on by itself
    admin.page.unroute("**/baton/cluster")
    expect(admin.page.get_by_role("alert")).to_have_count(0)


def test_a_tenants_key_shows_its_own_only(tab: Console, watch: Watch, stack: Baton) -> None:
    # Given requests of two tenants
    theirs, ours = ask(stack), ask(stack, OTHER_KEY)
    tab.sign_in(OTHER_KEY)
    # Then the list has the own one alone, and there is no cluster
    table = tab.page.get_by_role("table", name="Recent requests")
    expect(table.get_by_role("link", name=ours[:12])).to_be_visible()
    expect(table.get_by_role("link", name=theirs[:12])).to_have_count(0)
    expect(tab.page.get_by_role("navigation").get_by_role("link")).to_have_text(["Requests", "Chat"])
    # And a link to another's request finds nothing
    watch.expected.append("status of 404")
    tab.open(f"#/trace/{theirs}")
    expect(tab.page.get_by_text("There is no such trace here.")).to_be_visible()


def test_requests_are_filtered_and_failures_are_named(admin: Console, stack: Baton) -> None:
    # Given a request that ran and one that was refused
    fine = ask(stack)
    with pytest.raises(Exception, match="temperature"):
        stack.openai().completions.create(model=MODEL, prompt="x", temperature=9)
    rows = admin.page.get_by_role("table", name="Recent requests").locator("tbody tr")
    expect(rows.filter(has_text="Failed: invalid_value")).not_to_have_count(0)
    # When the box is ticked, then failures alone are left
    admin.page.get_by_label("Failed only").check()
    expect(rows.filter(has_not_text="Failed: ")).to_have_count(0)
    admin.page.get_by_label("Failed only").uncheck()
    # When words are typed, then only what has them all
    admin.page.get_by_label("Filter").fill(f"demo {fine[:20]}")
    expect(rows).to_have_count(1)
    admin.page.get_by_label("Filter").fill("nothing like this")
    expect(admin.page.get_by_text("No request matches the filter.")).to_be_visible()


def test_everything_by_keyboard_alone(tab: Console, stack: Baton) -> None:
    assert stack.record is not None
    press, focused = tab.page.keyboard.press, tab.focused
    older, newer = ask(stack), ask(stack)
    # Sign in
    tab.open()
    expect(tab.page.get_by_label("API key")).to_be_focused()
    tab.page.keyboard.type(stack.record.admin_key)
    press("Enter")
    rows = tab.page.get_by_role("table", name="Recent requests")
    expect(rows.get_by_role("link", name=newer[:12])).to_be_visible()
    # Tab enters the table at one row; arrows go on; a row that comes in above does not take the focus
    tab.tab_to(newer[:12])
    press("ArrowDown")
    assert older[:12] in focused()
    latest = ask(stack)
    expect(rows.get_by_role("link", name=latest[:12])).to_be_visible()
    assert older[:12] in focused()
    press("ArrowUp")
    assert newer[:12] in focused()
    # Enter opens the waterfall; arrows select spans; Escape leads back to the row
    press("Enter")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(f"Request {newer[:12]}")
    expect(tab.page.get_by_role("heading", level=1)).to_be_focused()
    expect(tab.page.get_by_role("button", name="policy.settle")).to_be_visible()
    spans = tab.page.get_by_label("Waterfall").get_by_role("button")
    tab.page.keyboard.press("Tab")
    expect(spans.first).to_be_focused()
    press("ArrowDown")
    expect(spans.nth(1)).to_be_focused()
    expect(spans.nth(1)).to_have_attribute("aria-pressed", "true")
    press("End")
    expect(spans.last).to_be_focused()
    press("Escape")
    expect(rows.get_by_role("link", name=newer[:12])).to_be_focused()
    # Nothing traps: Tab leads past the table's end and from the top to the chat
    tab.tab_to("Chat")
    press("Enter")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("Chat")
    tab.tab_to("Message")
    tab.page.keyboard.type("one")
    press("Shift+Enter")
    tab.page.keyboard.type("two")
    tab.tab_to("Max tokens")
    tab.page.keyboard.type("2000")
    press("Enter")
    turn = tab.page.get_by_role("article")
    expect(turn.locator(".question")).to_have_text("one\ntwo")
    expect(turn.locator(".answer")).not_to_be_empty()
    # Escape stops; what came is kept
    press("Escape")
    expect(turn).to_contain_text("stopped")
    assert turn.locator(".answer").inner_text()
    expect(tab.page.get_by_label("Message")).to_be_focused()


def test_a_typed_prompt_is_never_lost(admin: Console, watch: Watch, stack: Baton) -> None:
    assert stack.record is not None
    watch.expected += ["Failed to load resource"]
    admin.go("Chat")
    box, path = admin.page.get_by_label("Message"), "**/v1/chat/completions"
    # When nothing answers
    admin.page.route(path, lambda route: route.abort())
    turn = admin.send("precious words")
    expect(turn.get_by_role("alert")).to_contain_text("The gateway does not answer.")
    expect(box).to_have_value("precious words")
    admin.page.unroute(path)
    # When it refuses
    busy = '{"error": {"message": "too much to do", "code": "overloaded"}}'
    admin.page.route(path, lambda route: route.fulfill(status=503, headers={"Retry-After": "3"}, body=busy))
    turn = admin.send("precious words")
    expect(turn.get_by_role("alert")).to_contain_text("too much to do (retry in 3 s)")
    expect(box).to_have_value("precious words")
    admin.page.unroute(path)
    # When the stream breaks in the middle, then the piece that came is kept too
    piece = 'data: {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "a piece"}}]}\n\n'
    admin.page.route(path, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=piece))
    turn = admin.send("precious words")
    expect(turn.get_by_role("alert")).to_contain_text("The answer broke off.")
    expect(turn.locator(".answer")).to_have_text("a piece")
    expect(turn.locator(".question")).to_have_text("precious words")
    admin.page.unroute(path)
    # When the key is refused in between, then the words wait behind the sign-in
    box.fill("precious words")
    admin.page.route(path, lambda route: route.fulfill(status=401, body='{"error": {"message": "revoked"}}'))
    admin.page.get_by_role("button", name="Send").click()
    expect(admin.page.get_by_role("alert").filter(has_text="The key is not valid.")).to_be_visible()
    expect(admin.page.get_by_label("API key")).to_be_focused()
    admin.page.unroute(path)
    # And a reload changes nothing about it
    admin.page.reload()
    admin.sign_in(stack.record.admin_key, "#/chat")
    expect(box).to_have_value("precious words")
    admin.complete(admin.send("precious words"))
    expect(box).to_have_value("")
    # But nobody else finds them
    box.fill("private words")
    admin.page.evaluate("sessionStorage.removeItem('baton.console.key')")
    admin.page.reload()
    admin.sign_in(OTHER_KEY, "#/chat")
    expect(box).to_have_value("")


def test_a_phone_shows_all_without_scrolling_sideways(admin: Console, stack: Baton) -> None:
    answer = ask(stack)
    admin.page.set_viewport_size({"width": 360, "height": 740})
    admin.page.emulate_media(reduced_motion="reduce", color_scheme="dark")
    expect(admin.page.get_by_role("table", name="Recent requests")).to_be_visible()
    assert admin.widest() <= 360
    # A row is a card whose lines are named, and still a row to a screen reader
    card = admin.page.get_by_role("row").filter(has=admin.page.get_by_role("link", name=answer[:12]))
    assert card.get_by_role("cell").first.evaluate("one => getComputedStyle(one, '::before').content") == '"Time"'
    admin.go("Cluster")
    expect(admin.page.get_by_role("meter").first).to_be_visible()
    assert admin.widest() <= 360
    admin.go("Chat")
    admin.complete(admin.send("x" * 300, max_tokens=30))
    assert admin.widest() <= 360
    admin.open(f"#/trace/{answer}")
    place = admin.page.get_by_role("button", name="scheduler.place")
    place.click()
    expect(admin.page.get_by_text("estimate local").locator("visible=true")).to_have_count(1)
    assert admin.widest() <= 360


def test_markup_from_outside_is_shown_as_text(page: Page, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a tenant and a model's answer that would run code if they were markup
    monkeypatch.setitem(KEYS, "key-hostile", HOSTILE)
    with scripted_gateway(lambda prompt: HOSTILE) as url:
        tab = console(page, watch, url)
        tab.sign_in("key-hostile", "#/chat")
        turn = tab.send(HOSTILE, max_tokens=200)
        tab.complete(turn)
        # Then all of it is text wherever it is shown
        expect(turn.locator(".answer")).to_have_text(HOSTILE)
        expect(turn.locator(".question")).to_have_text(HOSTILE)
        tab.go("Requests")
        expect(page.get_by_role("table").get_by_role("cell", name=HOSTILE)).to_be_visible()
        page.get_by_role("table").get_by_role("link").first.click()
        expect(page.get_by_label("The request").get_by_text(HOSTILE)).to_be_visible()
        assert page.locator("img, main script").count() == 0
        # And an id in the address is only looked for
        watch.expected.append("status of 404")
        tab.open(f"#/trace/{HOSTILE}%zz")
        expect(page.get_by_text("There is no such trace here.")).to_be_visible()


def test_the_policy_of_the_page_is_in_force(admin: Console, watch: Watch) -> None:
    # When a script tries to write markup, to run text, or to ask a stranger, then the browser refuses
    watch.expected += ["Content Security Policy", "TrustedHTML", "violates the following", "Failed to fetch"]
    tried = admin.page.evaluate(
        """async () => {
            const refused = {};
            try { document.body.innerHTML += '<b>x</b>'; } catch (error) { refused.markup = error.name; }
            try { await fetch('https://stranger.invalid/'); } catch (error) { refused.stranger = error.name; }
            const script = document.createElement('style');
            script.textContent = 'body { outline: 7px solid red }';
            document.head.append(script);
            refused.style = getComputedStyle(document.body).outlineWidth !== '7px';
            return refused;
        }"""
    )
    assert tried == {"markup": "TypeError", "stranger": "TypeError", "style": True}
    watch.foreign = [url for url in watch.foreign if "stranger.invalid" not in url]
