"""The form of an upload: any order of its parts, any cut of its bytes, and what it may not be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.gateway.upload import Upload
from shared.contracts.errors import BodyTooLarge, InvalidInput

TYPE = "multipart/form-data; boundary=cut"
CONTENT = b"line one\r\n--cu\r\n--cut-not\nline two\n"


def part(name: str, content: bytes, extra: str = "") -> bytes:
    return f'--cut\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + content + b"\r\n"


FILE = part("file", CONTENT, '; filename="a.jsonl"\r\nContent-Type: application/jsonl')
PURPOSE = part("purpose", b"batch")
ANCHOR, SECONDS = part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"3600")


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--cut--\r\n"


def read(data: bytes, piece: int = 7, max_bytes: int = 1000) -> tuple[Upload, bytes]:
    """An upload fed in pieces, and its file's bytes."""
    upload = Upload(TYPE, max_bytes)
    file = b""
    for start in range(0, len(data), piece):
        upload.feed(data[start : start + piece])
        file += upload.take(5)
    upload.finish()
    return upload, file + upload.take(max_bytes)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize(
    "parts",
    [(PURPOSE, FILE), (FILE, PURPOSE), (ANCHOR, FILE, SECONDS, PURPOSE), (FILE, PURPOSE, ANCHOR, SECONDS)],
    ids=["purpose first", "file first", "file amid", "expiry last"],
)
def test_the_parts_may_come_in_any_order_and_pieces(parts: Sequence[bytes], piece: int) -> None:
    upload, file = read(form(*parts), piece)
    assert file == CONTENT
    assert (upload.filename, upload.num_bytes) == ("a.jsonl", len(CONTENT))
    assert upload.expires_after_s() == (3600 if ANCHOR in parts else 0)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (form(PURPOSE), "file"),
        (form(FILE), "purpose"),
        (form(), "file"),
        (form(FILE, part("purpose", b"fine-tune")), "purpose"),
        (form(FILE, part("purpose", b"")), "purpose"),
        (form(FILE, PURPOSE, FILE), "file"),
        (form(FILE, PURPOSE, PURPOSE), "purpose"),
        (form(part("colour", b"red"), FILE, PURPOSE), "colour"),
        (form(FILE, PURPOSE, part("purpose2", b"x" * 5000)), "purpose2"),
        (form(FILE, part("purpose", b"x" * 5000)), "purpose"),
        (form(FILE, PURPOSE, ANCHOR), "expires_after[seconds]"),
        (form(FILE, PURPOSE, SECONDS), "expires_after[anchor]"),
        (form(FILE, PURPOSE, part("expires_after[anchor]", b"now"), SECONDS), "expires_after[anchor]"),
        (form(FILE, PURPOSE, ANCHOR, part("expires_after[seconds]", b"3599")), "expires_after[seconds]"),
        (form(FILE, PURPOSE, ANCHOR, part("expires_after[seconds]", b"\xb2")), "expires_after[seconds]"),
        (form(FILE, PURPOSE)[:-9], ""),
        (b"no form at all", ""),
        (form(FILE, PURPOSE).replace(b"form-data; name", b"x" * 3000 + b"; name"), ""),
    ],
)
def test_what_is_wrong_is_named(data: bytes, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(data)
    assert caught.value.param == param


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_only_forms_are_uploads(content_type: str) -> None:
    with pytest.raises(InvalidInput):
        Upload(content_type, 10)


def test_a_file_over_the_limit_is_refused_at_its_first_byte_over() -> None:
    assert read(form(FILE, PURPOSE), max_bytes=len(CONTENT))[1] == CONTENT
    with pytest.raises(BodyTooLarge):
        read(form(FILE, PURPOSE), max_bytes=len(CONTENT) - 1)


def test_a_wrong_purpose_is_known_before_the_file_is_here() -> None:
    upload = Upload(TYPE, 1000)
    upload.feed(part("purpose", b"fine-tune")[:-4])
    upload.check_purpose()  # it may yet become longer
    upload.feed(b"une\r\n" + FILE[:80])
    with pytest.raises(InvalidInput):
        upload.check_purpose()
