"""The proof that a stack is ready: one real token, asked for over HTTP like any client would."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from urllib.parse import urlsplit

from shared.contracts.errors import Unavailable

RETRY_S = 0.1
TRANSIENT = (425, 429, 502, 503, 504)


def first_token(url: str, api_key: str, model: str, timeout_s: float, over: threading.Event) -> float:
    """Ask for one token until one comes, or until `over`; seconds the successful request took.

    Raises Unavailable with the last reason.

    Blocking: run it in a thread.
    """
    deadline = time.monotonic() + timeout_s
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0 and not over.is_set():
        started = time.monotonic()
        try:
            status, body = _ask(url, api_key, model, left)
        except (OSError, http.client.HTTPException) as exc:
            status, body, reason = 503, b"", f"{type(exc).__name__}: {exc}"
        if status == 200:
            return time.monotonic() - started
        if body:
            reason = f"HTTP {status}: {body.decode(errors='replace')[:500]}"
        if status not in TRANSIENT:
            break
        over.wait(RETRY_S)
    raise Unavailable(f"no token came through the whole stack: {reason}")


def _ask(url: str, api_key: str, model: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of a completion of one token: every model can do that. A 200 without a token counts as 502."""
    where = urlsplit(url)
    host = where.hostname or ""
    connection = http.client.HTTPConnection(host, where.port, timeout=timeout_s)
    if where.scheme == "https":
        # our own process of a moment ago, by an address its certificate need not name
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, where.port, timeout=timeout_s, context=context)
    request = {"model": model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(request), headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status == 200 and json.loads(body)["usage"]["completion_tokens"] < 1:
        return 502, body
    return answer.status, body
