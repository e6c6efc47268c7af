"""Chat templates: the same text as transformers, errors that name the messages, and nothing else raised."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.errors import InvalidInput, SettingsError
from shared.text.chat_template import plain_messages, render, string_constants
from shared.text.tokenizer import load_tokenizer
from tests.tiny_tokenizer import CHATML

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Héllo <b>&amp;</b>\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye 你好"},
]
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "Größe <x> 'y'", "parameters": {"type": "object"}}}
]

# the constructs that published templates use, one each
TEMPLATES = {
    "chatml": CHATML,
    "blocks": """
{%- for m in messages %}
    {% if m.role == 'system' %}
<<SYS>>{{ m.content | trim }}<</SYS>>
    {% else %}
        {%- set who = m['role'] | upper %}
{{ who }}: {{ m.content }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
ASSISTANT:{% endif %}""",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + (m.content | length) %}"
    "{% endfor %}{{ ns.n }} {{ bos_token }}{{ eos_token }}",
    "tools": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}{{ messages[1] | tojson }}",
    "macro": "{% macro turn(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "slices": "{{ messages[1:][0].content.split('<')[0].strip() }}{{ messages[-1]['content'][::-1] }}",
    "undefined": "{{ messages[0].name }}{% if messages[0].tool_calls is defined %}x{% endif %}{{ nothing }}",
}


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered = utilities.render_jinja_template([messages], chat_template=template, **options)
    return str((rendered[0] if isinstance(rendered, tuple) else rendered)[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(name: str, prompt: bool) -> None:
    expected = theirs(
        TEMPLATES[name], TALK, tools=TOOLS, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
    )
    assert render(TEMPLATES[name], TALK, prompt, tools=TOOLS, bos_token="<s>", eos_token="</s>") == expected


@pytest.mark.model
def test_the_default_models_template(default_model_dir: Path) -> None:
    template = load_tokenizer(default_model_dir).chat_template
    assert template is not None
    assert render(template, TALK) == theirs(template, TALK, add_generation_prompt=True)
    assert render(template, TALK[1:2]).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert render(CHATML, [{"role": "user", "content": parts}]) == render(CHATML, [{"role": "user", "content": "a b"}])


def test_the_date_is_the_one_passed_in() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    assert render(template, TALK, now=datetime(2024, 2, 29)) == "29 Feb 2024"
    with pytest.raises(InvalidInput, match="date"):
        render(template, TALK)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (CHATML, [], "at least one"),
        (CHATML, ["x"], "object"),
        (CHATML, [{"content": "x"}], "role"),
        (CHATML, [{"role": "<|im_end|>", "content": "x"}], "role"),
        (CHATML, [{"role": ["user"], "content": "x"}], "role"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text"),
        (CHATML, [{"role": "user", "content": ["x"]}], "text"),
        (CHATML, [{"role": "user", "content": 3}], "content"),
        (CHATML, [{"role": "user", "content": None}], "TypeError"),
        (CHATML, [{"role": "user"}], "content"),
        (CHATML, [{"role": "user", "content": "\ud800"}], "surrogate"),
        (CHATML, [{"role": "user", "content": "", "x": object()}], "JSON"),
        ("{{ raise_exception('only\n  users') }}", TALK, "only users"),
        ("{{ messages.__class__.__mro__ }}", TALK, "refuses"),
        ("{{ messages.append(1) }}", TALK, "refuses"),
        ("{{ missing.field }}", TALK, "missing"),
        ("{{ 1 / 0 }}", TALK, "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", TALK, "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TALK, "RecursionError"),
        ("{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}", TALK, "longer than"),
        ("{{ range(10000000) }}", TALK, "OverflowError"),
    ],
)
def test_what_cannot_be_rendered_is_invalid_input(template: str, messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        render(template, messages, max_chars=1000)
    assert caught.value.param == "messages"
    assert "\n" not in caught.value.message


def test_deep_nesting_is_refused() -> None:
    nested: Any = "x"
    for _ in range(100):
        nested = [nested]
    with pytest.raises(InvalidInput, match="nested"):
        plain_messages([{"role": "user", "content": "", "extra": nested}])


def test_rendering_leaves_the_callers_messages_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render(CHATML, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_a_template_that_does_not_compile_is_the_operators_fault() -> None:
    string_constants(CHATML)
    with pytest.raises(SettingsError, match="does not compile"):
        string_constants("{% for %}")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(JSON, st.fixed_dictionaries({"role": st.just("user"), "content": JSON})), max_size=3))
def test_any_json_renders_or_is_invalid_input(messages: list[Any]) -> None:
    for template in TEMPLATES.values():
        with contextlib.suppress(InvalidInput):
            assert isinstance(render(template, messages), str)
