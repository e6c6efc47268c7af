"""A multipart upload, read piece by piece: fields are kept, the file's bytes are handed on. Knows no bus."""

from __future__ import annotations

from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shared.contracts.errors import BodyTooLarge, InvalidInput

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
FORM_BYTES = 64 * 1024
"""What a form may take beside its file."""
MAX_FIELD_BYTES = 1024
MAX_HEADER_BYTES = 2048
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000


class Upload:
    """The form of `POST /v1/files`, in any order of its parts.

    Args:
        content_type: the request's header.
        max_bytes: most bytes of the file.

    Raises InvalidInput for a request that is no multipart form.
    """

    def __init__(self, content_type: str, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidInput("the body must be multipart/form-data with a boundary", code="invalid_form")
        self.filename = ""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._fields: dict[str, bytearray] = {}
        self._file = bytearray()
        self._files = 0
        self._taken = 0
        self._part = ""
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._ended = False
        callbacks: Any = {
            "on_part_begin": self._on_part_begin,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_header_field": lambda data, start, end: self._grow(self._header, data[start:end], MAX_HEADER_BYTES),
            "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end], MAX_HEADER_BYTES),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_end": self._on_end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as exc:
            raise InvalidInput(f"the form is broken: {exc}", code="invalid_form") from exc

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body.

        Raises InvalidInput for a broken form, naming the field; BodyTooLarge at the first byte over the limit, also of
        what is neither file nor field.
        """
        self._taken += len(data)
        if self._taken - self.num_bytes > FORM_BYTES + len(data):
            raise BodyTooLarge(f"a form may take {FORM_BYTES} bytes beside its file")
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise InvalidInput(f"the form is broken: {exc}", code="invalid_form") from exc

    def take(self, size: int) -> bytes:
        """The next `size` bytes of the file; fewer when fewer are here."""
        taken = bytes(self._file[:size])
        del self._file[:size]
        return taken

    @property
    def waiting(self) -> int:
        """Bytes of the file that nobody took."""
        return len(self._file)

    @property
    def begun(self) -> bool:
        """True once the file's part has begun."""
        return self._files > 0

    def finish(self) -> None:
        """The body has ended. Raises InvalidInput naming what is missing."""
        if not self._ended:
            raise InvalidInput("the form ends before its last boundary", code="invalid_form")
        if not self._files:
            raise InvalidInput("file is required", param="file", code="missing_required_parameter")
        if "purpose" not in self._fields:
            raise InvalidInput("purpose is required", param="purpose", code="missing_required_parameter")
        self.check_purpose()
        self.expires_after_s()

    def check_purpose(self) -> None:
        """Raises InvalidInput when a purpose is here in whole that is not `batch`."""
        if self._field("purpose") not in (None, "batch") and self._part != "purpose":
            raise InvalidInput("purpose must be 'batch': files serve batches only", param="purpose")

    def expires_after_s(self) -> int:
        """Seconds from its creation to its end; 0 when it is to be kept. Raises InvalidInput."""
        anchor, text = (self._field(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and text is None:
            return 0
        if anchor != "created_at":
            raise InvalidInput("expires_after[anchor] must be 'created_at'", param="expires_after[anchor]")
        text = text or ""
        if not (text.isascii() and text.isdigit() and len(text) < 9 and MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S):
            raise InvalidInput(
                f"expires_after[seconds] must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param="expires_after[seconds]"
            )
        return int(text)

    def _field(self, name: str) -> str | None:
        found = self._fields.get(name)
        return None if found is None else found.decode("latin-1")

    # ------------------------------------------------------------------------------------------ the parser's news

    def _on_part_begin(self) -> None:
        self._part, self._disposition = "", b""

    def _on_part_end(self) -> None:
        self._part = ""

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            self._files += 1
            if self._files > 1:
                raise InvalidInput("one file at a time", param="file")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "upload"
        elif not name:
            raise InvalidInput("a part of the form has no name", code="invalid_form")
        elif name not in FIELDS:
            raise InvalidInput(f"{name[:100]}: unknown parameter", param=name[:100], code="unknown_parameter")
        elif name in self._fields:
            raise InvalidInput(f"{name} is given twice", param=name)
        else:
            self._fields[name] = bytearray()
        self._part = name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self.num_bytes += end - start
            if self.num_bytes > self._max_bytes:
                raise BodyTooLarge(f"a file has at most {self._max_bytes} bytes", param="file")
            self._file += data[start:end]
        else:
            self._grow(self._fields[self._part], data[start:end], MAX_FIELD_BYTES)

    def _on_end(self) -> None:
        self._ended = True

    def _grow(self, held: bytearray, more: bytes, limit: int) -> None:
        if len(held) + len(more) > limit:
            raise InvalidInput(f"a field of the form has over {limit} bytes", param=self._part, code="invalid_form")
        held += more
