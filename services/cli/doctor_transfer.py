"""The part of `./baton doctor` that looks at how KV goes between machines."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from pathlib import Path

from cryptography import x509

from services.cli.doctor import FAIL, OK, SKIP, WARN, Finding
from shared.contracts.errors import SettingsError
from shared.kv.transfer_options import transfer_options
from shared.kv.transfer_path import KvAddress, parse_address
from shared.kv.transfer_server import announced, open_listener
from shared.settings.sections import KvSettings

SOON = datetime.timedelta(days=14)


def transfer(kv: KvSettings, now: datetime.datetime) -> Finding:
    """Can a prefill worker serve its KV as set, and would a decode worker believe it?

    What is wrong with the settings themselves is told by the check of settings.
    """
    options = transfer_options(kv)
    if not options.over_tcp:
        return Finding("KV transfer", SKIP, "kv.transfer = 'shared-memory': nothing is served over TCP")
    try:
        options.require()
        listener = open_listener(options.host, options.port, options.tls)
    except SettingsError as exc:
        return Finding("KV transfer", FAIL, exc.message, "correct it, or set kv.transfer to shared-memory")
    with listener:
        address = announced(options.host, options.port or listener.getsockname()[1], options.tls, options.name)
    told = parse_address(address)
    assert told is not None
    detail = f"where no folder is shared, over TCP at {address}" + ("" if options.port else ", or any free port")
    if not options.tls:
        return Finding("KV transfer", OK, f"{detail}: on this machine alone")
    return _certificate(Path(options.cert), told, detail, now)


def _certificate(path: Path, told: KvAddress, detail: str, now: datetime.datetime) -> Finding:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    until = certificate.not_valid_after_utc
    if not certificate.not_valid_before_utc <= now < until:
        return Finding("KV transfer", FAIL, f"kv.transfer_cert: {path} is not valid today", "make a new one")
    if not _names(certificate, told.host):
        text = f"kv.transfer_cert: {path} is not for {told.host}, which decode workers connect to"
        return Finding(
            "KV transfer", FAIL, text, f"make one for {told.host}, or set kv.transfer_name to what it is for"
        )
    try:
        socket.getaddrinfo(told.host, told.port)
    except OSError:
        text = f"{told.host}, which decode workers connect to, is not known to this machine's resolver"
        return Finding("KV transfer", WARN, text, "set kv.transfer_name to a name or address that they know")
    if until - now < SOON:
        text = f"{detail}; kv.transfer_cert ends on {until:%d %B %Y}"
        return Finding("KV transfer", WARN, text, "make a new one, then ./baton restart all")
    return Finding("KV transfer", OK, detail)


def _names(certificate: x509.Certificate, host: str) -> bool:
    """Whether it is for a host, as TLS clients compare: by its alternative names alone."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    try:
        return ipaddress.ip_address(host) in names.get_values_for_type(x509.IPAddress)
    except ValueError:
        known = [name.lower() for name in names.get_values_for_type(x509.DNSName)]
        return host.lower() in known or f"*.{host.lower().partition('.')[2]}" in known
