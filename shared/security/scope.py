"""The id of a sharing scope: who may share, and in which exact KV format. Equal ids, and equal salts of
the requests, are what "may share KV" means."""

from __future__ import annotations

import hashlib

import msgspec

from shared.contracts.errors import Forbidden
from shared.contracts.grants import Scope
from shared.security.canonical import encode_fields

SCOPE_DOMAIN = "baton.scope.v1"


class KvFormat(msgspec.Struct, frozen=True):
    """What KV must have in common to be interchangeable.

    `fingerprint` covers layer groups, KV dtype, tile layout, model digest and numerics (`shared/kv/layout.py`); the
    others stand beside it so that a scope depends on them even if a worker computed its fingerprint too narrowly.
    """

    fingerprint: str
    model_digest: str
    numerics: str
    block_sizes: tuple[int, ...]  # tokens a block, per layer group


def scope_id(scope: Scope, kv_format: KvFormat) -> str:
    """64 hex digits; differs whenever tenant, authorization set, generation or any part of the format differs.

    A salt is not part of it: it changes the key (`shared/security/tags.py: salted_key`).

    Raises Forbidden for a scope without a tenant: no scope, no sharing.
    """
    if not scope.tenant:
        raise Forbidden("a scope without a tenant shares nothing")
    content = encode_fields(
        (
            SCOPE_DOMAIN,
            scope.tenant,
            tuple(sorted(set(scope.authorization))),
            scope.generation,
            kv_format.fingerprint,
            kv_format.model_digest,
            kv_format.numerics,
            len(kv_format.block_sizes),
            *kv_format.block_sizes,
        )
    )
    return hashlib.blake2b(content, digest_size=32).hexdigest()
