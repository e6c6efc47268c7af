"""Bodies nested deeper than anything that makes sense."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from shared.contracts.errors import InvalidInput
from shared.ingress.json_depth import MAX_DEPTH, too_deep
from shared.ingress.parse import json_object


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(("levels", "deep"), [(1, False), (MAX_DEPTH, False), (MAX_DEPTH + 1, True), (900, True)])
def test_levels_are_counted(levels: int, deep: bool) -> None:
    text = nested(levels)
    assert too_deep(json.loads(text), text.encode()) == deep


def test_brackets_in_strings_and_siblings_are_no_levels() -> None:
    text = json.dumps({"a": "[" * 1000, "b": [[{}]] * 1000})
    assert not too_deep(json.loads(text), text.encode())


def test_it_agrees_with_recursion() -> None:
    rng = random.Random(5)

    def value(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([1, "[", None])
        some = [value(depth - 1) for _ in range(rng.randrange(1, 3))]
        return some if rng.random() < 0.5 else {str(number): item for number, item in enumerate(some)}

    def depth_of(item: Any) -> int:
        children = list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if children is None else 1 + max(map(depth_of, children), default=0)

    for _ in range(300):
        made = value(7)
        text = json.dumps(made).encode()
        assert too_deep(made, text, 4) == (depth_of(made) > 4)


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 5_000, 1_000_000])
def test_a_body_too_deep_is_no_json_to_us(levels: int) -> None:
    for body in (nested(levels), '{"messages":' + nested(levels) + "}", '{"a":' * levels + "1" + "}" * levels):
        with pytest.raises(InvalidInput) as caught:
            json_object(body.encode())
        assert caught.value.code == "invalid_json"
        assert "nested too deeply" in caught.value.message
