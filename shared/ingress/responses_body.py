"""A response as OpenAI's Responses API gives it: its events, and the object they come to. Pure.

What was thought, what was said and each call are an item of `output` each, in the order in which they came. Streamed or
not, the same pieces make the same response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shared.contracts.errors import BatonError
from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage, call_id
from shared.ingress.error_body import error_body
from shared.ingress.request_plan import RequestPlan
from shared.ingress.responses_schema import ResponsesRequest
from shared.tools.tool_stream import CallArguments, CallStart, Content

Event = dict[str, Any]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """One response on its way.

    Args:
        asked: repeated in the response.
        plan: for what the server decided.
        created: unix seconds.
        tier: the service tier that serves it; "" when none was named.
        first_event: number of the first one.
    """

    def __init__(
        self,
        asked: ResponsesRequest,
        plan: RequestPlan,
        request_id: str,
        created: int,
        tier: str = "",
        first_event: int = 0,
    ) -> None:
        self._request_id = request_id
        self._head = {
            "id": response_id(request_id),
            "object": "response",
            "created_at": created,
            **_repeated(asked, plan),
        }
        if tier:
            self._head["service_tier"] = tier
        self._output: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._finish = ""
        self._events = first_event

    # ------------------------------------------------------------------------------------------ events

    def begin(self) -> list[Event]:
        """The first events."""
        return [self._told("response.created"), self._told("response.in_progress")]

    def queued(self) -> list[Event]:
        """The first events of one that nobody waits for; `started` is the next."""
        response = self.now("queued")
        return [self._event(kind, response=response) for kind in ("response.created", "response.queued")]

    def started(self) -> list[Event]:
        """The event of a queued one that begins."""
        return [self._told("response.in_progress")]

    def piece(self, piece: Piece) -> list[Event]:
        """The events of what came."""
        events: list[Event] = []
        if piece.thoughts:
            events += self._add("reasoning", piece.thoughts)
        for news in piece.in_order:
            if isinstance(news, Content):
                events += self._add("message", news.text)
            elif isinstance(news, CallStart):
                events += self._begin_call(news)
            else:
                events += self._arguments(news)
        if piece.finish:
            self._finish = piece.finish
            events += self._close("incomplete" if piece.finish == "length" else "completed")
        return events

    def end(self, usage: Usage) -> Event:
        """The last event of a response that came to its end."""
        incomplete = self._finish == "length"
        self._head["usage"] = _usage(usage)
        return self._told("response.incomplete" if incomplete else "response.completed")

    def failed(self, error: BatonError) -> list[Event]:
        """The last events of one that did not."""
        events = self._close("incomplete")
        return [*events, self._event("response.failed", response=self.now("failed") | {"error": _error(error)})]

    def cancelled(self) -> list[Event]:
        """The last events of one that was cancelled; there is none of its own for that."""
        events = self._close("incomplete")
        return [*events, self._event("response.failed", response=self.now("cancelled"))]

    def now(self, status: str) -> dict[str, Any]:
        """The response as it is, with its output so far."""
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": details,
            "output": list(self._output),
        }

    # ------------------------------------------------------------------------------------------ inside

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event

    def _told(self, kind: str) -> Event:
        status = kind.removeprefix("response.").replace("created", "in_progress")
        return self._event(kind, response=self.now(status))

    def _add(self, kind: str, text: str) -> list[Event]:
        """Text of the item that is open, or of a new one."""
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events += self._close("completed") + self._begin(kind, _fields(kind))
            part = _part(kind, "")
            events.append(self._event("response.content_part.added", **self._at(), content_index=0, part=part))
        assert self._open is not None
        self._open.texts.append(text)
        name = f"response.{_PARTS[kind]}.delta"
        return [*events, self._event(name, **self._at(), content_index=0, delta=text, **_scores(kind))]

    def _begin_call(self, start: CallStart) -> list[Event]:
        given = {"call_id": call_id(self._request_id, 0, start.index), "name": start.name, "arguments": ""}
        return self._close("completed") + self._begin("function_call", given)

    def _arguments(self, news: CallArguments) -> list[Event]:
        assert self._open is not None
        if not news.text:
            return []
        self._open.texts.append(news.text)
        return [self._event("response.function_call_arguments.delta", **self._at(), delta=news.text)]

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> list[Event]:
        index = len(self._output)
        name = hashlib.blake2b(f"{self._request_id}|item|{index}".encode(), digest_size=12).hexdigest()
        self._open = _OpenItem(kind, f"{_PREFIXES[kind]}_{name}", fields)
        item = self._open.body("in_progress")
        return [self._event("response.output_item.added", output_index=index, item=item)]

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self._output)}

    def _close(self, status: str) -> list[Event]:
        """The open item is whole."""
        item = self._open
        if item is None:
            return []
        at, text = self._at(), item.text
        if item.kind == "function_call":
            done = self._event("response.function_call_arguments.done", **at, name=item.fields["name"], arguments=text)
            events = [done]
        else:
            part = _part(item.kind, text)
            events = [
                self._event(
                    f"response.{_PARTS[item.kind]}.done", **at, content_index=0, text=text, **_scores(item.kind)
                ),
                self._event("response.content_part.done", **at, content_index=0, part=part),
            ]
        whole = item.body(status)
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=whole))
        self._output.append(whole)
        self._open = None
        return events


def response_id(request_id: str) -> str:
    """A response's id: its request's under another name."""
    return f"resp_{request_id.removeprefix('req-')}"


def ended_without_run(response: Mapping[str, Any], error: BatonError | None) -> dict[str, Any]:
    """A queued response that nobody will run: failed, or with no error cancelled."""
    if error is None:
        return {**response, "status": "cancelled"}
    return {**response, "status": "failed", "error": _error(error)}


def _error(error: BatonError) -> dict[str, str]:
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # of the few there are
    return {"code": code, "message": error_body(error)["error"]["message"]}


class _OpenItem:
    def __init__(self, kind: str, item_id: str, fields: Mapping[str, Any]) -> None:
        self.kind = kind
        self.id = item_id
        self.fields = fields
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def body(self, status: str) -> dict[str, Any]:
        common = {"id": self.id, "type": self.kind, "status": status, **self.fields}
        if self.kind == "function_call":
            return common | {"arguments": self.text}
        return common | {"content": [_part(self.kind, self.text)] if self.texts else []}


def _fields(kind: str) -> dict[str, Any]:
    return {"role": "assistant"} if kind == "message" else {"summary": []}


def _part(kind: str, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **extra}


def _scores(kind: str) -> Mapping[str, Any]:
    return {"logprobs": []} if kind == "message" else MappingProxyType({})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # the client library's type needs both; to keep a prompt costs nothing
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _repeated(asked: ResponsesRequest, plan: RequestPlan) -> dict[str, Any]:
    """What the response says of its request."""
    form = asked.text.format if asked.text is not None else None
    choice = asked.tool_choice
    told: dict[str, Any] = {
        "model": plan.model,
        "background": bool(asked.background),
        "error": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "temperature": plan.sampling.temperature,
        "top_p": plan.sampling.top_p,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "tools": [_tool(tool.model_dump()) for tool in asked.tools or ()],
        "truncation": "disabled",
    }
    described = {name: getattr(asked, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
    return told | {name: value for name, value in described.items() if value is not None}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    description = {} if tool["description"] is None else {"description": tool["description"]}
    kept = {"type": "function", "name": tool["name"], "parameters": tool["parameters"]}
    return kept | {"strict": bool(tool["strict"])} | description
