"""Which stack a command talks to: flag, else environment, else the one that runs on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from services.cli.state import running_stack
from services.cli.words import NO_STACK
from shared.contracts.errors import BatonError, Internal, InvalidInput, Unavailable
from shared.lifecycle.plain_text import one_line

URL_VARIABLE, KEY_VARIABLE, ADMIN_VARIABLE = "BATON_URL", "BATON_API_KEY", "BATON_ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class Connection:
    """A gateway and the key to use there."""

    url: str
    key: str

    def headers(self) -> dict[str, str]:
        """The headers of a request."""
        return {"Authorization": f"Bearer {self.key}"}

    def refusal(self, response: httpx.Response) -> BatonError:
        """An answer that is not 200, as an error with the server's words."""
        try:
            error = response.json()["error"]
            message = one_line(str(error["message"]))
        except (ValueError, KeyError, TypeError):
            message = "the answer is not Baton's"
        if response.status_code == 401:
            message = f"the API key is not valid at {self.url}"
        return Internal(f"HTTP {response.status_code}: {message}")


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """`--url` and `--api-key`."""
    parser.add_argument(
        "--url", metavar="URL", help=f"address of the gateway; default: ${URL_VARIABLE}, else the running stack"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"key; better: ${KEY_VARIABLE}, as arguments are visible to other users"
    )


def connection(options: argparse.Namespace, env: Mapping[str, str], *, admin: bool = False) -> Connection:
    """Where to and with which key; `admin` wants the admin key. Raises Unavailable when nothing is known,
    InvalidInput for what is no address."""
    url = options.url or env.get(URL_VARIABLE, "")
    if url and not url.startswith(("http://", "https://")):
        raise InvalidInput(f"{url!r} is not the address of a gateway, such as http://127.0.0.1:8080", param="url")
    key = options.api_key or (admin and env.get(ADMIN_VARIABLE)) or env.get(KEY_VARIABLE, "")
    if not url or not key:
        stack = running_stack(env)
        if stack is None and not url:
            raise Unavailable(f"{NO_STACK}, or set {URL_VARIABLE}")
        if stack is not None and (not url or url.rstrip("/") == stack.url.rstrip("/")):
            url = url or stack.url
            key = key or (stack.admin_key if admin else stack.api_key)
        if not key:
            variable = ADMIN_VARIABLE if admin else KEY_VARIABLE
            raise Unavailable(f"no API key for {url}; set {variable}, or give one with --api-key")
    return Connection(url.rstrip("/").removesuffix("/v1"), key)
