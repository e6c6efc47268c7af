"""How a worker may exchange KV, out of Baton's settings, and what is wrong with that before anything listens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.kv.transfer_path import AUTO, ONLY_SHARED_MEMORY, is_loopback
from shared.settings.sections import KvSettings

SETTINGS = ("kv.transfer_host", "kv.transfer_cert", "kv.transfer_key", "kv.transfer_ca")
"""Those that `TransferOptions.require` looks at."""
NEEDS_TLS = (
    "kv.transfer_host: {} is not loopback, which KV leaves by TLS only: set kv.transfer_cert, kv.transfer_key and "
    "kv.transfer_ca"
)


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """As the settings `kv.transfer` and `kv.transfer_*` say. Files are PEM; all three, or none."""

    transfer: str = AUTO
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def tls(self) -> bool:
        return bool(self.cert)

    @property
    def over_tcp(self) -> bool:
        return self.transfer != ONLY_SHARED_MEMORY

    def require(self) -> None:
        """Raises SettingsError, naming the setting, for what could not serve or pull."""
        files = {"transfer_cert": self.cert, "transfer_key": self.key, "transfer_ca": self.ca}
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            message = f"kv.{missing[0]} is missing: KV over TLS needs all three files"
            raise SettingsError(message, param=f"kv.{missing[0]}")
        for name, path in files.items():
            _require_readable(name, path)
        if self.tls:
            self.server_tls()
        elif self.over_tcp and not is_loopback(self.host):
            raise SettingsError(NEEDS_TLS.format(self.host), param="kv.transfer_host")

    def server_tls(self) -> ssl.SSLContext | None:
        """For a source: shows our certificate, and asks for one of the authority's. None without files."""
        return self._context(ssl.PROTOCOL_TLS_SERVER) if self.tls else None

    def client_tls(self) -> ssl.SSLContext | None:
        """For a sink: the same, and the source's certificate must have the name that was connected to."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT) if self.tls else None

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # no password is asked for: nobody sits at a worker that starts
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (ssl.SSLError, ValueError, OSError) as exc:
            message = f"kv.transfer_cert: {self.cert} and {self.key} are no certificate and its key without a password"
            raise SettingsError(message, param="kv.transfer_cert") from exc
        try:
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as exc:
            message = f"kv.transfer_ca: {self.ca} holds no certificate of an authority"
            raise SettingsError(message, param="kv.transfer_ca") from exc
        return context


AS_DEFAULT = TransferOptions()


def transfer_options(kv: KvSettings) -> TransferOptions:
    """As the section says; ~ in a file's path is the home folder."""
    cert, key, ca = (
        str(Path(path).expanduser()) if path else "" for path in (kv.transfer_cert, kv.transfer_key, kv.transfer_ca)
    )
    return TransferOptions(kv.transfer, kv.transfer_host, kv.transfer_port, kv.transfer_name, cert, key, ca)


def _require_readable(name: str, path: str) -> None:
    if not path:
        return
    try:
        with Path(path).open("rb"):
            pass
    except OSError as exc:
        raise SettingsError(f"kv.{name}: {path}: {exc.strerror}", param=f"kv.{name}") from exc
