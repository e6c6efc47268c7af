"""`./baton purge`: take everything of a tenant out of the running stack, and show or check the receipt."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from services.cli.nats_config import check_tenant
from services.cli.policy_admin import ask_policy
from services.cli.state import state_path
from shared.contracts import admin_messages as am
from shared.contracts.errors import BatonError, InvalidInput, Unavailable
from shared.lifecycle.plain_text import one_line
from shared.security.grant_signature import load_public_keys
from shared.security.receipts import verify_receipt

PENDING = 3
"""Exit code while somebody has not acknowledged."""
WAIT_S = 30.0
LOOK_S = 0.3
FOREIGN = {
    "tenant": ("gone", "key"),
    "status": ("cache_only", "remove", "reason", "wait", "key"),
    "verify": ("cache_only", "remove", "reason", "wait", "gone"),
}
"""Options that say nothing to each of the three."""


class ReceiptFile(msgspec.Struct):
    """What `--json` prints: the receipt to be read, and the signed text that counts."""

    receipt: am.PurgeReceipt
    payload: str
    signature: str
    key_id: str


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when it could not be done, 3 while owners of copies are pending."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return _run(options, os.environ, parser)
    except BatonError as exc:
        print(f"baton purge: {one_line(exc.message)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton purge",
        description="Take everything of a tenant out of the running stack: what runs ends, what is cached is "
        "overwritten, what is stored is deleted. Prints a receipt, signed by policy: who took what, who is pending.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tenant", metavar="TENANT", help="whose")
    what.add_argument("--status", metavar="ID", nargs="?", const="", help="a purge as it stands; without ID the latest")
    what.add_argument("--verify", metavar="FILE", help="check the signature of a receipt, as --json prints it")
    parser.add_argument("--cache-only", action="store_true", help="spare what was stored: responses, files, batches")
    parser.add_argument("--remove", action="store_true", help="end the tenant's keys too")
    parser.add_argument("--reason", default="", metavar="TEXT", help="kept on the receipt")
    gone = "with --status ID: the memory of its machine is lost, do not wait for it"
    parser.add_argument("--gone", default=[], action="append", metavar="WORKER", help=gone)
    parser.add_argument("--wait", type=float, metavar="S", help=f"for the owners of copies (default: {WAIT_S:.0f})")
    parser.add_argument("--key", metavar="FILE", help="with --verify: policy's public key (default: the stack's)")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    return parser


def _run(options: argparse.Namespace, env: Mapping[str, str], parser: argparse.ArgumentParser) -> int:
    asked = next((name for name in FOREIGN if getattr(options, name) is not None), None)
    if asked is None:
        parser.error("one of --tenant, --status and --verify is needed")
    for name in FOREIGN[asked]:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does not go with --{asked}")
    if asked == "verify":
        return _verify(options, env)
    if asked == "status":
        return _status(options, env)
    ask = am.PurgeStart(
        tenant=check_tenant(options.tenant),
        reason=options.reason,
        cache_only=options.cache_only,
        remove=options.remove,
    )
    (signed,) = ask_policy(env, ask, am.Purges).receipts
    print(f"baton purge: {_opened(signed).purge_id} is ordered", file=sys.stderr)
    deadline = time.monotonic() + (WAIT_S if options.wait is None else options.wait)
    while not (receipt := _opened(signed)).complete and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        with suppress(Unavailable):  # the order stands: policy goes on with it when it is back
            (signed,) = ask_policy(env, am.PurgeQuery(purge_id=receipt.purge_id), am.Purges).receipts
    _print(signed, options.json)
    return 0 if receipt.complete else PENDING


def _status(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    if options.gone:
        if not options.status:
            raise InvalidInput("--gone needs the ID of a purge: --status ID", param="gone")
        found = ask_policy(env, am.PurgeStart(purge_id=options.status, gone=tuple(options.gone)), am.Purges)
    else:
        found = ask_policy(env, am.PurgeQuery(purge_id=options.status), am.Purges)
    for signed in found.receipts:
        _print(signed, options.json)
    return 0 if all(_opened(signed).complete for signed in found.receipts) else PENDING


def _verify(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    path = Path(options.verify)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ReceiptFile)
    except (OSError, msgspec.MsgspecError) as exc:
        raise InvalidInput(f"{path}: not a receipt: {exc}", param=str(path)) from exc
    key_file = Path(options.key) if options.key else state_path(env) / "secrets" / "grant-public-key"
    signed = am.SignedReceipt(found.payload, found.signature, found.key_id)
    receipt = verify_receipt(load_public_keys(key_file), signed)
    if receipt != found.receipt:
        raise InvalidInput(f"{path}: what it shows is not what was signed", param=str(path))
    if options.json:
        print(json.dumps({"valid": True, "purge_id": receipt.purge_id, "complete": receipt.complete}))
    else:
        print(f"signed by key {signed.key_id}")
        print(shown(receipt))
    return 0


def _opened(signed: am.SignedReceipt) -> am.PurgeReceipt:
    return msgspec.json.decode(signed.payload, type=am.PurgeReceipt)


def _print(signed: am.SignedReceipt, as_json: bool) -> None:
    receipt = _opened(signed)
    if as_json:
        file = ReceiptFile(receipt, signed.payload, signed.signature, signed.key_id)
        print(msgspec.json.encode(file).decode())
    else:
        print(shown(receipt))


def shown(receipt: am.PurgeReceipt) -> str:
    """A receipt for people. Pure."""
    what = "cache only" if receipt.cache_only else "removed" if receipt.removed else "everything"
    lines = [
        f"{receipt.purge_id}  tenant {receipt.tenant}  {what}  {'complete' if receipt.complete else 'PENDING'}",
        f"  ordered {_when(receipt.ordered_s)}; generation {receipt.generation} is the first that lives",
    ]
    if receipt.reason:
        lines.append(f"  reason: {one_line(receipt.reason)}")
    for owner in receipt.owners:
        counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in owner.counts.items())
        lines.append(f"  {owner.owner:<24} +{max(0.0, owner.at_s - receipt.ordered_s):.2f} s  {counts}".rstrip())
    lines += [f"  {owner:<24} pending" for owner in receipt.pending]
    return "\n".join(lines)


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
