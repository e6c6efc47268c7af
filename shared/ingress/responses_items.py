"""What a response was made from, as items that are stored, listed and gone on from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from shared.ingress.responses_schema import (
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    TextPart,
)

Item = dict[str, Any]


def told_items(items: Sequence[InputItem], name: bytes) -> list[Item]:
    """Items as the API lists them.

    One without an id, or with that of one before it, by which pages of a list could not be told apart, gets its own, by
    its place and `name`, which nobody can guess.
    """
    told: list[Item] = []
    ids: set[str] = set()
    for index, item in enumerate(items):
        item_id = item.id if item.id and item.id not in ids else _new_id(item, index, name)
        ids.add(item_id)
        told.append({"id": item_id, **_told(item)})
    return told


def page(items: Sequence[Item], *, limit: int, descending: bool, after: str, before: str) -> tuple[list[Item], bool]:
    """A page of a list, and whether there is more; `after` and `before` are ids, empty for none.

    Raises LookupError with the name of the one that no item has.
    """
    ordered = list(reversed(items)) if descending else list(items)
    ids = [item["id"] for item in ordered]
    first, end = 0, len(ordered)
    if after:
        if after not in ids:
            raise LookupError("after")
        first = ids.index(after) + 1
    if before:
        if before not in ids:
            raise LookupError("before")
        end = ids.index(before)
    found = ordered[first:end]
    return found[:limit], len(found) > limit


def _told(item: InputItem) -> Item:
    common: Item = {"type": item.type}
    status = item.status or "completed"
    if isinstance(item, MessageItem):
        return common | {"role": item.role, "status": status, "content": _message_parts(item)}
    if isinstance(item, FunctionCallItem):
        return common | {
            "status": status,
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.arguments,
        }
    if isinstance(item, FunctionOutputItem):
        output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
        return common | {"status": status, "call_id": item.call_id, "output": output}
    content = _parts(item.content or (), "reasoning_text")
    return common | {"status": status, "summary": [], "content": content}


def _message_parts(item: MessageItem) -> list[Item]:
    said = item.role == "assistant"
    texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
    extra: Item = {"annotations": [], "logprobs": []} if said else {}
    return [{"type": "output_text" if said else "input_text", "text": text, **extra} for text in texts]


def _parts(parts: Sequence[TextPart], kind: str) -> list[Item]:
    return [{"type": kind, "text": part.text} for part in parts]


def _new_id(item: InputItem, index: int, name: bytes) -> str:
    digest = hashlib.blake2b(b"%d" % index, digest_size=12, key=name[:64]).hexdigest()
    prefixes = {MessageItem: "msg", FunctionCallItem: "fc", FunctionOutputItem: "fco", ReasoningItem: "rs"}
    return f"{prefixes[type(item)]}_{digest}"
