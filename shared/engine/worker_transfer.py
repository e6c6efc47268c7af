"""A worker's ways of exchanging KV, opened as its settings say: the listener of a source, the transports of a sink."""

from __future__ import annotations

import logging

from msgspec import structs

from shared.contracts.errors import SettingsError
from shared.engine.worker_shell import WorkerShell
from shared.kv.tcp_transport import TcpTransport
from shared.kv.transfer import Transport
from shared.kv.transfer_path import ONLY_TCP
from shared.kv.transfer_server import Served, TransferServer, announced, open_listener
from shared.kv.transports import Transports
from shared.telemetry import metric_names as names

log = logging.getLogger("baton.kv")


def open_transport(shell: WorkerShell) -> Transport:
    """How this worker reads peers' blocks into its own pool.

    Raises:
        SettingsError: TCP is asked for and cannot be had.
    """
    core = shell.core
    options, mapped = core.options.transfer, core.open_transport()
    if not _over_tcp(shell):
        return mapped
    options.require()
    tcp = TcpTransport(core.facts.layout.groups, core.pool.span, options.client_tls())
    return Transports(shell.kv, mapped, tcp)


def open_server(shell: WorkerShell) -> TransferServer | None:
    """Listen for decode workers that cannot map this worker's pool, and say so in beats; None where nobody may.

    Raises:
        SettingsError: TCP is asked for and cannot be had.
    """
    if not _over_tcp(shell):
        return None
    core, options = shell.core, shell.core.options.transfer
    options.require()
    served = Served(int(shell.incarnation), core.facts.fingerprint, core.pool.span)
    listener = open_listener(options.host, options.port, options.tls)
    server = TransferServer(
        listener, served, options.server_tls(), lambda outcome: shell.metrics.inc(names.KV_READS, outcome=outcome)
    )
    shell.kv = structs.replace(shell.kv, address=announced(options.host, server.port, options.tls, options.name))
    log.info("%s serves its KV at %s", shell.worker, shell.kv.address)
    server.start()
    return server


def _over_tcp(shell: WorkerShell) -> bool:
    """A pool on a GPU is read by CUDA IPC alone."""
    options = shell.core.options
    if options.device != "cuda":
        return options.transfer.over_tcp
    if options.transfer.transfer == ONLY_TCP:
        raise SettingsError("kv.transfer 'tcp' does not carry KV of a GPU's pool: set it to auto", param="kv.transfer")
    return False
