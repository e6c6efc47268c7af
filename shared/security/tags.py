"""Block tags: a keyed hash chain over a prompt's full blocks. Knows neither scopes nor where keys come from.

    tag_i = BLAKE2b-128(key = scope key; domain, tag_{i-1}, group, token ids as u32 little-endian)

The first block's parent is empty. Equal tags therefore mean: same scope key, same layer group, same tokens from
position 0 on. Without the key a tag says nothing about the tokens. (BLAKE2 keyed mode: RFC 7693, section 2.5.)
"""

from __future__ import annotations

import hashlib

from shared.contracts.errors import ProtocolError
from shared.contracts.ids import BlockTag
from shared.security.canonical import encode_fields

TAG_BYTES = 16
KEY_BYTES = 32
TOKEN_BYTES = 4
DOMAIN = "baton.block-tag.v1"
SALT_DOMAIN = "baton.salted-key.v1"
ROOT = BlockTag(b"")
"""The parent of a sequence's first block."""


def tag_chain(key: bytes, group: int, block_size: int, token_ids: bytes, parent: BlockTag = ROOT) -> list[BlockTag]:
    """Tags of the whole blocks in `token_ids`, in order, following `parent`.

    Args:
        key: the scope's key, 32 bytes.
        group: layer group; groups never share tags.
        block_size: tokens a block.
        token_ids: u32 little-endian; a partial block at the end is left out.

    Raises ProtocolError when `parent` is neither empty nor a tag, ValueError for a key of another length.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a scope key has {KEY_BYTES} bytes, not {len(key)}")
    if len(parent) not in (0, TAG_BYTES):
        raise ProtocolError(f"a parent tag has {TAG_BYTES} bytes, not {len(parent)}")
    span = block_size * TOKEN_BYTES
    tags: list[BlockTag] = []
    for start in range(0, len(token_ids) - span + 1, span):
        content = encode_fields((DOMAIN, parent, group, token_ids[start : start + span]))
        parent = BlockTag(hashlib.blake2b(content, key=key, digest_size=TAG_BYTES).digest())
        tags.append(parent)
    return tags


def salted_key(key: bytes, salt: bytes) -> bytes:
    """The key of those requests of a scope that share a salt; derived, so that made-up salts fill no store."""
    return hashlib.blake2b(encode_fields((SALT_DOMAIN, salt)), key=key, digest_size=KEY_BYTES).digest()


def matchable_blocks(num_tokens: int, block_size: int) -> int:
    """Full blocks that may come from a cache: floor((n - 1) / block_size), as the last token is always computed."""
    return max(0, num_tokens - 1) // block_size
