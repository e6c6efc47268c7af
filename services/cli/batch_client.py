"""Files and batches of a running stack over HTTP, for `./baton batch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from services.cli.connection import Connection
from shared.contracts.errors import InvalidInput, Unavailable

CONNECT_S, READ_S = 5.0, 60.0
MAX_LINE_BYTES = 16 * 1024 * 1024

Batch = dict[str, Any]


class BatchClient:
    """Every method raises BatonError with what the server or the network said."""

    def __init__(self, target: Connection) -> None:
        self._target = target

    def upload(self, path: Path) -> str:
        """The id of an uploaded file; sent as it is read."""
        try:
            with path.open("rb") as file, self._client() as client:
                form = {"file": (path.name, file, "application/jsonl")}
                return str(self._json(client.post("/v1/files", data={"purpose": "batch"}, files=form))["id"])
        except OSError as exc:
            raise InvalidInput(f"{path}: {exc.strerror or exc}", param=str(path)) from exc

    def create(self, file_id: str, endpoint: str, metadata: dict[str, str]) -> Batch:
        """A new batch."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": metadata}
        return self._call("POST", "/v1/batches", json=body)

    def get(self, batch_id: str) -> Batch:
        """One batch."""
        return self._call("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    def cancel(self, batch_id: str) -> Batch:
        """One batch, cancelling."""
        return self._call("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    def newest(self, limit: int) -> list[Batch]:
        """Up to `limit` batches, newest first."""
        found: list[Batch] = []
        more, after = True, dict[str, str]()
        while more and len(found) < limit:
            page = self._call("GET", "/v1/batches", params={"limit": min(100, limit - len(found)), **after})
            found += page["data"]
            more, after = page["has_more"], {"after": page["last_id"]}
        return found

    def delete_file(self, file_id: str) -> None:
        """Delete a file."""
        self._call("DELETE", f"/v1/files/{quote(file_id, safe='')}")

    def content(self, file_id: str) -> Iterator[bytes]:
        """The bytes of a file, piece by piece."""
        with self._client() as client, client.stream("GET", f"/v1/files/{quote(file_id, safe='')}/content") as response:
            if response.status_code != 200:
                response.read()
                raise self._target.refusal(response)
            yield from response.iter_bytes()

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._client() as client:
            found: dict[str, Any] = self._json(client.request(method, path, **options))
            return found

    def _json(self, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise self._target.refusal(response)
        return response.json()

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        target = self._target
        try:
            with httpx.Client(
                base_url=target.url, headers=target.headers(), timeout=httpx.Timeout(READ_S, connect=CONNECT_S)
            ) as client:
                yield client
        except httpx.ConnectError as exc:
            raise Unavailable(f"nothing answers at {target.url}; is it running? ./baton up starts it") from exc
        except httpx.HTTPError as exc:
            raise Unavailable(f"the connection to {target.url} broke ({type(exc).__name__})") from exc


def first_url(path: Path) -> str:
    """The `url` of a file's first line, which is the batch's endpoint. Raises InvalidInput naming file and line."""
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_LINE_BYTES)
    except OSError as exc:
        raise InvalidInput(f"{path}: {exc.strerror or exc}", param=str(path)) from exc
    if not line:
        raise InvalidInput(f"{path}: the file is empty", param=str(path))
    try:
        url = json.loads(line.decode("utf-8-sig"))["url"]
    except (ValueError, RecursionError):
        raise InvalidInput(f"{path}:1: this line is not JSON", param=str(path)) from None
    except (KeyError, TypeError):
        raise InvalidInput(f"{path}:1: a line needs a url, such as /v1/chat/completions", param=str(path)) from None
    if not isinstance(url, str):
        raise InvalidInput(f"{path}:1: url must be a string", param=str(path))
    return url
