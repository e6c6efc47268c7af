"""Where the gateway meets the network: its certificate, the proxies it believes, the pages that may ask."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from ipaddress import ip_network

from shared.contracts.errors import SettingsError

_ORIGIN = re.compile(r"https?://[^\s/?#@*]+")


@dataclass(frozen=True, slots=True)
class Edge:
    """Empty: no TLS, nobody is believed, no page of another origin may ask.

    Attributes:
        cert, key: PEM files.
        proxies: networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.
        origins: origins of pages; `*` is all.
    """

    cert: str = ""
    key: str = ""
    proxies: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


NO_EDGE = Edge()


def make_edge(cert: str, key: str, proxies: str, origins: str) -> Edge:
    """From the settings `tls_cert`, `tls_key`, `trusted_proxies` and `cors_origins`; the last two are comma-separated.

    Raises SettingsError naming the one at fault.
    """
    if bool(cert) != bool(key):
        missing = "tls_key" if cert else "tls_cert"
        raise SettingsError(f"gateway.{missing} is missing: TLS needs both files", param=f"gateway.{missing}")
    if cert:
        _check_pair(cert, key)
    return Edge(cert, key, tuple(map(_network, _parts(proxies))), tuple(map(_origin, _parts(origins))))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_pair(cert: str, key: str) -> None:
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as exc:
            raise SettingsError(f"gateway.{name}: {path}: {exc.strerror}", param=f"gateway.{name}") from exc
    try:
        # no password is asked for: nobody sits at a gateway that starts
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as exc:
        message = f"gateway.tls_cert: {cert} and {key} are no certificate and its key without a password"
        raise SettingsError(message, param="gateway.tls_cert") from exc


def _network(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError as exc:
        message = f"gateway.trusted_proxies: {text} is no address and no network such as 10.0.0.0/8"
        raise SettingsError(message, param="gateway.trusted_proxies") from exc


def _origin(text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        message = f"gateway.cors_origins: {text} is no origin such as https://app.example.com, and not *"
        raise SettingsError(message, param="gateway.cors_origins")
    return text
