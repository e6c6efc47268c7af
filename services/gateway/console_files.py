"""The console page's files, read once at start, and the headers that keep the page to itself.

Nothing here needs a key: the files hold no data. What the page shows it asks for with the key its user typed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

FOLDER = Path(__file__).with_name("console")
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".preact": "text/plain; charset=utf-8",
    ".htm": "text/plain; charset=utf-8",
}
"""By suffix; other files of the folder are not served. The last two are the libraries' licences."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, ready to be sent."""

    body: bytes
    content_type: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Every file that is served, by its path below the folder."""
    found: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = PageFile(body, TYPES[path.suffix], etag)
    return found


class ConsoleFiles:
    """Handlers of the page's routes."""

    def __init__(self, files: dict[str, PageFile] | None = None) -> None:
        self._files = read_files() if files is None else files

    def add_to(self, app: FastAPI) -> None:
        """`/console` and what is below it; `/` sends browsers there."""
        methods = ["GET", "HEAD"]
        app.add_api_route("/", self.root, methods=methods)
        app.add_api_route("/console", self.page, methods=methods)
        app.add_api_route("/console/{path:path}", self.file, methods=methods)

    async def root(self, request: Request) -> Response:
        """A browser wants to see something; a program is told that there is nothing."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return RedirectResponse("console", 307, headers=HEADERS)

    async def page(self, request: Request) -> Response:
        """GET /console"""
        return self._answer(request, INDEX)

    async def file(self, request: Request, path: str) -> Response:
        """GET /console/{path}"""
        if path in ("", INDEX):
            # the page's own links are relative to `/console`
            return RedirectResponse("../console", 307, headers=HEADERS)
        return self._answer(request, path)

    def _answer(self, request: Request, path: str) -> Response:
        found = self._files.get(path)
        if found is None:
            raise HTTPException(404)
        headers = {**HEADERS, "ETag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.content_type)
