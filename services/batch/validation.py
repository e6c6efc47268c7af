"""The check of a batch's input, line by line as its bytes come; nothing but one line is held. Pure.

The written rule: any bad line fails the whole batch, and nothing of it is run or billed. A line must be a JSON object
with `custom_id` (a string, not blank, unique), `method` "POST", `url` (the batch's endpoint) and `body` (a request that
this endpoint accepts, not streamed, of the one model of the batch). A byte order mark, CRLF and a missing final newline
are fine, and so is one blank line at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from services.batch.records import ItemBody
from shared.contracts.batch_messages import BatchError
from shared.contracts.errors import BatonError, InvalidInput
from shared.ingress.openai_schema import CompletionRequest, GenerationRequest
from shared.ingress.parse import param_name, parse_chat, parse_completion

MAX_ERRORS = 100
MAX_CUSTOM_ID_CHARS = 512
BOM = b"\xef\xbb\xbf"


def _checked(request: GenerationRequest) -> GenerationRequest:
    """Raises InvalidInput for what an item cannot ask for."""
    if isinstance(request, CompletionRequest) and len(request.prompt) > 1:
        raise InvalidInput("prompt: one prompt a line", param="prompt")
    if request.service_tier == "priority":
        raise InvalidInput("service_tier: batches run in a class of their own", param="service_tier")
    return request


ENDPOINTS: Mapping[str, Callable[[bytes], GenerationRequest]] = {
    "/v1/chat/completions": lambda body: _checked(parse_chat(body)),
    "/v1/completions": lambda body: _checked(parse_completion(body)),
}
"""Endpoints that take batches, with the parser of their bodies."""
_FIELDS = ("custom_id", "method", "url", "body")
_RAW_LINE: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class LineFault(Exception):
    """Why a line is refused; `param` is its field."""

    def __init__(self, code: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose own fields are in order; `request` is its checked body."""

    custom_id: str
    url: str
    body: bytes
    request: GenerationRequest


def parse_line(line: bytes, endpoint: str = "") -> Line:
    """One line of a batch with this endpoint, or of the queue, which has none. Raises LineFault."""
    fields = _fields(line)
    custom_id = _custom_id(fields)
    method, url = _text(fields, "method"), _text(fields, "url")
    if method != "POST":
        raise LineFault("invalid_method", 'method must be "POST"', "method")
    if url not in ENDPOINTS:
        raise LineFault("invalid_url", f"url must be one of {', '.join(ENDPOINTS)}", "url")
    if endpoint and url != endpoint:
        raise LineFault("invalid_url", f"url must be the batch's endpoint, {endpoint}", "url")
    if "body" not in fields:
        raise LineFault("missing_required_parameter", "body is required", "body")
    body = bytes(fields["body"])
    return Line(custom_id, url, body, _request(url, body))


def custom_id_of(line: bytes) -> str:
    """The custom_id of a line however bad the rest of it is; empty when it has no usable one."""
    try:
        return _custom_id(_fields(line))
    except LineFault:
        return ""


def _fields(line: bytes) -> dict[str, msgspec.Raw]:
    try:
        fields = _RAW_LINE.decode(line)
        line.decode()
    except UnicodeDecodeError:
        raise LineFault("invalid_json_line", "this line is not UTF-8 text") from None
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise LineFault("invalid_json_line", f"this line is not a JSON object: {str(exc)[:120]}") from None
    for name in fields:
        if name not in _FIELDS:
            param = param_name((name,))
            raise LineFault("unknown_parameter", f"{param}: a line has {', '.join(_FIELDS)} and nothing else", param)
    return fields


def _custom_id(fields: Mapping[str, msgspec.Raw]) -> str:
    custom_id = _text(fields, "custom_id")
    if not custom_id.strip():
        raise LineFault("invalid_custom_id", "custom_id must not be blank", "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise LineFault(
            "invalid_custom_id", f"custom_id must have at most {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    return custom_id


def _text(fields: Mapping[str, msgspec.Raw], name: str) -> str:
    if name not in fields:
        raise LineFault("missing_required_parameter", f"{name} is required", name)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except msgspec.MsgspecError:
        code = "invalid_custom_id" if name == "custom_id" else "invalid_value"
        raise LineFault(code, f"{name} must be a string", name) from None


def _request(url: str, body: bytes) -> GenerationRequest:
    try:
        request = ENDPOINTS[url](body)
    except InvalidInput as exc:
        param = f"body.{exc.param}" if exc.param else "body"
        raise LineFault(exc.code, exc.message, param) from None
    if request.stream:
        raise LineFault("invalid_value", "stream: a batch is not streamed", "body.stream")
    return request


class Validator:
    """Takes the bytes of a batch's input in pieces of any size.

    Args:
        endpoint: the batch's.
        check_model: raises UnknownModel or Forbidden for a model the tenant may not use.
        count_tokens: of a request's prompt; raises InvalidInput for one that can never run.
        max_lines: most lines.
        max_line_bytes: longest line.

    `errors` tells what is wrong, at most MAX_ERRORS; `done` that no more need be read.
    """

    def __init__(
        self,
        endpoint: str,
        check_model: Callable[[str], None],
        count_tokens: Callable[[GenerationRequest], int],
        *,
        max_lines: int,
        max_line_bytes: int,
    ) -> None:
        self.errors: list[BatchError] = []
        self.model = ""
        self.total = 0
        self.tokens = 0
        self.done = False
        self._endpoint = endpoint
        self._check_model = check_model
        self._count_tokens = count_tokens
        self._max_lines = max_lines
        self._splitter = LineSplitter(max_line_bytes)
        self._seen: dict[bytes, int] = {}
        self._blank = 0
        self._models: dict[str, LineFault | None] = {}

    def feed(self, data: bytes) -> list[tuple[int, ItemBody]]:
        """The good lines that are complete with this piece, by number from 1."""
        return self._take(self._splitter.feed(data))

    def finish(self) -> list[tuple[int, ItemBody]]:
        """The last line, when no newline ends it."""
        items = self._take(self._splitter.finish())
        if not self.total and not self.errors:
            self._add(BatchError("empty_file", "the file has no lines"))
        return items

    def _take(self, lines: Iterator[tuple[int, bytes | None]]) -> list[tuple[int, ItemBody]]:
        items: list[tuple[int, ItemBody]] = []
        for number, line in lines:
            if self.done:
                break
            if self._blank:
                self._add(BatchError("blank_line", f"line {self._blank} is blank", self._blank))
                self._blank = 0
            if line is not None and not line.strip():
                self._blank = number  # right only at the end of the file
                continue
            try:
                items.append((number, self._item(number, line)))
            except LineFault as fault:
                self._add(BatchError(fault.code, fault.message, number, fault.param))
        return [] if self.errors else items

    def _item(self, number: int, line: bytes | None) -> ItemBody:
        if number > self._max_lines:
            self.done = True
            raise LineFault("too_many_lines", f"a batch has at most {self._max_lines} lines")
        self.total += 1
        if line is None:
            raise LineFault("line_too_long", f"a line has at most {self._splitter.max_bytes} bytes")
        try:
            parsed = parse_line(line, self._endpoint)
        except LineFault:
            self._unique(custom_id_of(line), number)
            raise
        self._unique(parsed.custom_id, number)
        self._one_model(parsed.request.model)
        tokens = self._tokens(parsed.request)
        self.tokens += tokens
        return ItemBody(parsed.custom_id, parsed.url, parsed.body, tokens)

    def _unique(self, custom_id: str, number: int) -> None:
        if not custom_id:
            return
        # hashes, since names may be long and lines many
        first = self._seen.setdefault(hashlib.blake2b(custom_id.encode(), digest_size=16).digest(), number)
        if first != number:
            raise LineFault("duplicate_custom_id", f"line {first} has this custom_id too", "custom_id")

    def _one_model(self, model: str) -> None:
        if model not in self._models:
            if len(self._models) > MAX_ERRORS:
                raise LineFault("mismatched_model", "all lines must ask for one model", "body.model")
            self._models[model] = self._model_fault(model)
        if (fault := self._models[model]) is not None:
            raise fault
        self.model = self.model or model
        if model != self.model:
            raise LineFault(
                "mismatched_model", f"all lines must ask for one model; the first one is {self.model}", "body.model"
            )

    def _model_fault(self, model: str) -> LineFault | None:
        try:
            self._check_model(model)
        except BatonError as exc:
            return LineFault(exc.code, exc.message, "body.model")
        return None

    def _tokens(self, request: GenerationRequest) -> int:
        try:
            return self._count_tokens(request)
        except InvalidInput as exc:
            raise LineFault(exc.code, exc.message, f"body.{exc.param}" if exc.param else "body") from None

    def _add(self, error: BatchError) -> None:
        self.errors.append(error)
        self.done = self.done or len(self.errors) >= MAX_ERRORS


class LineSplitter:
    """Bytes to lines, numbered from 1, without their ends; None stands for a line of over `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._number = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes | None]]:
        """The lines that end in this piece."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            yield self._line()
            start = end + 1
        self._keep(data[start:])

    def finish(self) -> Iterator[tuple[int, bytes | None]]:
        """The rest, if no newline ended it."""
        if self._size:
            yield self._line()

    def _keep(self, part: bytes) -> None:
        if not part:
            return
        self._size += len(part)
        # one byte over for the CR, and a mark at the start of the file
        if self._size <= self.max_bytes + 1 + len(BOM):
            self._parts.append(part)
        else:
            self._parts.clear()

    def _line(self) -> tuple[int, bytes | None]:
        line, size = b"".join(self._parts), self._size
        self._parts.clear()
        self._size = 0
        self._number += 1
        if size and not line:
            return self._number, None
        line = line.removesuffix(b"\r")
        if self._number == 1:
            line = line.removeprefix(BOM)
        return self._number, line if len(line) <= self.max_bytes else None
