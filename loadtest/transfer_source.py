"""`python -m loadtest.transfer_source FOLDER BLOCKS`: a process whose KV is pulled, until its input ends.

Prints one line of JSON: its addresses, the name of its pool, and the digest of every block.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.contracts.attempt import Attempt
from shared.contracts.ids import Dispatch, Epoch, RequestId, WorkerId
from shared.engine.worker_fake import FakePool
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.transfer import digest_blocks
from shared.kv.transfer_options import TransferOptions
from shared.kv.transfer_server import Served, TransferServer, announced, open_listener

HOST = "127.0.0.1"
GROUPS = (LayerGroup("full", tuple(range(30)), 3, 64, 32, "bfloat16"),)
"""As the default model has them: 720 KiB a block of 32 tokens."""
ATTEMPT = Attempt(RequestId("bench"), Epoch(1), Dispatch(1))
INCARNATION, GENERATION, FINGERPRINT = 1, 1, "bench"
TOKEN = bytes(range(16))
WORKER = WorkerId("prefill-bench")


def main(argv: Sequence[str]) -> int:
    """Serve until standard input ends; its exit code."""
    folder, count = Path(argv[0]), int(argv[1])
    pool = FakePool(folder, WORKER, PoolLayout(GROUPS, (count,)))
    draw = random.Random(1)
    for block in range(count):
        pool.span(0, block)[:] = draw.randbytes(GROUPS[0].span_bytes)
    digests = digest_blocks(pool.span, ATTEMPT, [(0, block, GENERATION, block) for block in range(count)])
    servers = [_server(pool, count, options) for options in (TransferOptions(), certificate(folder))]
    facts = {
        "pool": pool.path.name,
        "addresses": [
            announced(HOST, server.port, tls, "") for server, tls in zip(servers, (False, True), strict=True)
        ],
        "digests": [digest.hex() for digest in digests],
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
    for server in servers:
        server.stop()
    pool.close()
    return 0


def _server(pool: FakePool, count: int, options: TransferOptions) -> TransferServer:
    listener = open_listener(HOST, 0, options.tls)
    server = TransferServer(listener, Served(INCARNATION, FINGERPRINT, pool.span), options.server_tls())
    server.leases.name(ATTEMPT, TOKEN, [(0, block, GENERATION) for block in range(count)])
    server.start()
    return server


def certificate(folder: Path) -> TransferOptions:
    """One certificate for both ends, which is its own authority; made at the first call for a folder."""
    cert, key = folder / "bench.pem", folder / "bench.key"
    if not cert.exists():
        _make_certificate(cert, key)
    return TransferOptions(cert=str(cert), key=str(key), ca=str(cert))


def _make_certificate(cert: Path, key: Path) -> None:
    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(private, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    key.touch(mode=0o600)
    key.write_bytes(pem)
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
