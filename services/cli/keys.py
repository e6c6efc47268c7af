"""`./baton keys`: credentials of tenants, for HTTP and for the queue, made, shown and taken away.

`nats` works on the files of this machine's stack, running or not. The others ask policy, so they need a running stack.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from services.cli.credentials import ADMIN_TENANT, DEMO_TENANT, new_api_key
from services.cli.nats_config import check_tenant
from services.cli.policy_admin import ask_policy
from services.cli.queue_user import QueueUser, give, take
from services.cli.state import StateFolder, state_path
from services.cli.words import sentence
from shared.contracts import admin_messages as am
from shared.contracts.errors import BatonError, NotFound, SettingsError
from shared.contracts.grants import CLASSES, Limits
from shared.contracts.ids import TenantId
from shared.settings.load import load_settings, settings_file
from shared.settings.models import served_models
from shared.store.secrets import read_secret_text

LIMITS = Limits.__struct_fields__
DEFAULT = "default"

Ask = am.KeyCreate | am.KeyRevoke | am.LimitsChange | am.TermsChange | am.TenantsQuery


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when it could not be done."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.run(options, os.environ)
    except BatonError as exc:
        print(f"baton keys: {exc.message}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton keys", description="Credentials of tenants.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, summary: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=summary, description=sentence(summary))
        found.set_defaults(run=run)
        found.add_argument("--json", action="store_true", help="one JSON line")
        return found

    queue = command("nats", _nats, "print a tenant's credential for the queue; make it if there is none")
    queue.add_argument("tenant", metavar="TENANT")
    queue.add_argument("--revoke", action="store_true", help="take it away instead")
    command("show", _show, "print the two keys made with the stack: of the tenant demo, and the admin key")
    create = command("create", _create, "make an API key, and the tenant if there is none; shown this once")
    create.add_argument("tenant", metavar="TENANT", help="1 to 40 of a-z, 0-9 and -")
    create.add_argument("--id", default="", metavar="NAME", help="name of the key (default: made up)")
    create.add_argument("--parallel", type=_number, default=0, metavar="N", help="requests of it at once (0: no limit)")
    revoke = command("revoke", _revoke, "end an API key; requests under way go on")
    revoke.add_argument("tenant", metavar="TENANT")
    revoke.add_argument("key_id", metavar="KEY", help="its name, as in the list")
    listing = command(
        "list", _list, "show tenants: class, weight and limits of their own, names of their API keys, and what runs"
    )
    listing.add_argument("tenant", nargs="?", default="", metavar="TENANT", help="only this one")
    limits = command("limits", _limits, "change limits of a tenant, or show them; they hold from its next request on")
    limits.add_argument("tenant", metavar="TENANT")
    limits.add_argument("--key", default="", metavar="NAME", help="of this key, which may have --parallel, instead")
    terms = command("terms", _terms, "change a tenant's class and weight, or show them; for its next requests")
    terms.add_argument("tenant", metavar="TENANT")
    terms.add_argument("--class", dest="klass", default="", choices=CLASSES, help="highest its requests run in")
    terms.add_argument(
        "--weight",
        type=_weight,
        default=0.0,
        metavar="W",
        help="its share beside other tenants of the class (first: 1)",
    )
    for name in LIMITS:
        flags = [f"--{name.replace('_', '-')}", *(("--parallel",) if name == "max_parallel" else ())]
        limits.add_argument(*flags, dest=name, type=_limit, metavar="N", help=f"0: none; {DEFAULT}: as all")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return weight


def _limit(text: str) -> int | str:
    try:
        return text if text == DEFAULT else _number(text)
    except argparse.ArgumentTypeError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {DEFAULT!r}") from exc


# ---------------------------------------------------------------------------------------------- the queue


def _nats(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    check_tenant(options.tenant)
    state = StateFolder(state_path(env))
    if options.revoke:
        had = take(state, options.tenant)
        text = f"tenant {options.tenant} can no longer use the queue" if had else f"{options.tenant} had no credential"
        print(json.dumps({"tenant": options.tenant, "revoked": had}) if options.json else text)
        return 0
    user = give(state, options.tenant)
    if options.json:
        print(user.as_json())
    else:
        settings = load_settings({}, env, settings_file(env)).settings
        model = served_models(settings)[0].name
        print(shown(user, model, settings.bus.port))
    if user.url and not _known(env, user.tenant):
        print(
            f"note: there is no tenant {user.tenant} yet, so its lines come back as errors; "
            f"./baton keys create {user.tenant} makes it",
            file=sys.stderr,
        )
    return 0


def shown(user: QueueUser, model: str, port: int = 0) -> str:
    """The credential for people, with examples that work as they stand. Pure.

    Args:
        model: to ask for in the examples.
        port: that NATS will listen on, for a user without a URL; 0 = not known before.
    """
    names = user.subjects
    url = user.url or f"nats://127.0.0.1:{port or 'PORT'}"
    started = ""
    if not user.url:
        started = (
            "\nIn force with the next ./baton up" + ("" if port else "; [bus] port in baton.toml fixes PORT") + ".\n"
        )
    line = json.dumps(
        {
            "custom_id": "first",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 16},
        }
    )
    return f"""\
tenant {user.tenant}: credential for the queue
{started}
  url           {url}
  user          {user.user}
  password      {user.password}
  inbox prefix  {user.inbox_prefix}

  {names["submit"]:<36} publish a batch line; the answer says it is stored
  {names["results"]:<36} ask for results: {{"after": "", "limit": 100}}
  {names["done"]:<36} hear of each result as it comes

With the nats command line:

  export NATS_URL={url} NATS_USER={user.user} NATS_PASSWORD={user.password}
  nats --inbox-prefix {user.inbox_prefix} request {names["submit"]} '{line}'
  nats --inbox-prefix {user.inbox_prefix} request {names["results"]} '{{"limit": 100}}'

With nats-py:

  import asyncio, json, nats

  LINE = {line}

  async def main():
      queue = await nats.connect("{url}", user="{user.user}",
                                 password="{user.password}", inbox_prefix="{user.inbox_prefix}")
      stored = await queue.request("{names["submit"]}", json.dumps(LINE).encode(), timeout=5)
      print(stored.data.decode())
      after, pending = "", 1
      while pending:
          question = json.dumps({{"after": after, "limit": 100}}).encode()
          page = json.loads((await queue.request("{names["results"]}", question, timeout=5)).data)
          for line in page["data"]:
              print(line["custom_id"], line["response"] or line["error"])
          after, pending = page["after"], page["pending"] or page["has_more"]
          await asyncio.sleep(0.5)
      await queue.close()

  asyncio.run(main())
"""


def _known(env: Mapping[str, str], tenant: TenantId) -> bool:
    """False when policy says there is no such tenant; True also when it says nothing."""
    try:
        return bool(asked(env, am.TenantsQuery(tenant=tenant)).tenants)
    except BatonError:
        return True


# ---------------------------------------------------------------------------------------------- API keys and limits


def _create(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    tenant = check_tenant(options.tenant)
    key = new_api_key()
    digest = hashlib.sha256(key).digest()
    name = options.id or f"key-{digest.hex()[:8]}"
    asked(env, am.KeyCreate(tenant=tenant, key_id=name, key_hash=digest, max_parallel=options.parallel))
    if options.json:
        print(json.dumps({"tenant": tenant, "key_id": name, "api_key": key.decode()}))
    else:
        print(f"{key.decode()}\n\nKey {name} of tenant {tenant}. It is kept as a hash only, so it is not shown again.")
    return 0


def _revoke(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    tenant = check_tenant(options.tenant)
    asked(env, am.KeyRevoke(tenant=tenant, key_id=options.key_id))
    found = {"tenant": tenant, "key_id": options.key_id, "revoked": True}
    print(json.dumps(found) if options.json else f"key {options.key_id} of tenant {tenant} opens nothing any more")
    return 0


def _limits(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    tenant = check_tenant(options.tenant)
    given = {name: getattr(options, name) for name in LIMITS if getattr(options, name) is not None}
    changes = {name: None if value == DEFAULT else value for name, value in given.items()}
    change = am.LimitsChange(tenant=tenant, limits=changes, key_id=options.key)
    ask = change if changes else am.TenantsQuery(tenant=tenant)
    found = _existing(asked(env, ask), tenant)
    _print(_only(found, options.key) if options.key else found, options.json)
    return 0


def _terms(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    tenant = check_tenant(options.tenant)
    change = am.TermsChange(tenant=tenant, klass=options.klass, weight=options.weight)
    ask = change if options.klass or options.weight else am.TenantsQuery(tenant=tenant)
    _print(_existing(asked(env, ask), tenant), options.json)
    return 0


def _only(found: am.Tenants, key_id: str) -> am.Tenants:
    """The one tenant with this key alone. Raises NotFound when it has none such."""
    (tenant,) = found.tenants
    keys = tuple(key for key in tenant.keys if key.id == key_id)
    if not keys:
        raise NotFound(f"tenant {tenant.id!r} has no key {key_id!r}", param="key_id")
    return am.Tenants(tenants=(msgspec.structs.replace(tenant, keys=keys),))


def _list(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    tenant = check_tenant(options.tenant) if options.tenant else TenantId("")
    found = asked(env, am.TenantsQuery(tenant=tenant))
    _print(_existing(found, tenant) if tenant else found, options.json)
    return 0


def _existing(found: am.Tenants, tenant: TenantId) -> am.Tenants:
    """The answer about one tenant. Raises NotFound when there is none."""
    if not found.tenants:
        raise NotFound(f"there is no tenant {tenant!r}; ./baton keys create {tenant} makes it", param="tenant")
    return found


def _show(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    folder = state_path(env) / "secrets"
    try:
        api_key, admin_key = (read_secret_text(folder / name) for name in ("api-key", "admin-key"))
    except SettingsError:
        if (folder / "api-key").exists():
            raise
        raise NotFound(f"no stack was started on state folder {folder.parent} yet; ./baton up makes its keys") from None
    if options.json:
        print(json.dumps({"api_key": api_key, "admin_key": admin_key}))
    else:
        print(f"{DEMO_TENANT:<6} {api_key}\n{ADMIN_TENANT:<6} {admin_key}")
    return 0


def _print(found: am.Tenants, as_json: bool) -> None:
    if as_json:
        print(json.dumps([msgspec.to_builtins(tenant) for tenant in found.tenants]))
        return
    for tenant in found.tenants:
        terms = [tenant.klass, f"weight {tenant.weight:g}"]
        limits = [f"{name} {value}" for name, value in tenant.limits.items()]
        print(f"{tenant.id}  {', '.join(terms + limits + _running(tenant.running))}")
        for key in tenant.keys:
            marks = [mark for mark, holds in (("admin", key.admin), ("revoked", key.revoked)) if holds]
            limits = [f"max_parallel {key.max_parallel}"] if key.max_parallel else []
            print(f"  {key.id}  {', '.join(marks + limits + _running(key.running))}".rstrip())


def _running(count: int) -> list[str]:
    return [f"{count} running"] if count else []


def asked(env: Mapping[str, str], ask: Ask) -> am.Tenants:
    """Policy's answer. Raises what it raises, Unavailable when no stack runs."""
    return ask_policy(env, ask, am.Tenants)
