"""From a verified grant and tokens to block tags: the one place where scope, format and key come together."""

from __future__ import annotations

from dataclasses import dataclass

from services.prefix_cache_index.issued import IssuedTags, salted
from services.prefix_cache_index.scope_keys import ScopeKeys
from shared.contracts.errors import Forbidden, ProtocolError
from shared.contracts.grants import Grant
from shared.contracts.ids import BlockTag
from shared.contracts.parts import ExtendRun, GroupTags
from shared.security.generations import Generations
from shared.security.scope import KvFormat, scope_id
from shared.security.tags import TOKEN_BYTES, matchable_blocks, salted_key, tag_chain


@dataclass(frozen=True, slots=True)
class Tagger:
    """Computes tags. Its methods raise Unavailable when a key is needed and Redis does not answer, and Forbidden
    (`scope_ended`) when the grant's scope is below the newest generation of its tenant."""

    keys: ScopeKeys
    issued: IssuedTags
    generations: Generations

    async def prompt(self, grant: Grant, kv_format: KvFormat, token_ids: bytes) -> tuple[GroupTags, ...]:
        """Tags of a prompt's leading full blocks per layer group; the block that holds the last token is left out.

        Raises ProtocolError when `token_ids` are not whole u32s.
        """
        if len(token_ids) % TOKEN_BYTES:
            raise ProtocolError(f"token ids take {len(token_ids)} bytes, which is not a multiple of {TOKEN_BYTES}")
        num_tokens = len(token_ids) // TOKEN_BYTES
        scope, key = await self._scope(grant, kv_format)
        chains = []
        for group, block_size in enumerate(kv_format.block_sizes):
            end = matchable_blocks(num_tokens, block_size) * block_size * TOKEN_BYTES
            tags = tag_chain(key, group, block_size, token_ids[:end])
            self.issued.remember(scope, group, tags)
            chains.append(GroupTags(group, tuple(tags)))
        return tuple(chains)

    async def run(self, grant: Grant, kv_format: KvFormat, run: ExtendRun) -> tuple[BlockTag, ...]:
        """Tags of a run's blocks, following its parent.

        Raises Forbidden for a grant of another request, or a parent of another scope or group; Conflict
        (`unknown_parent`) for one this process does not know; ProtocolError for tokens that do not fill the blocks.
        """
        if run.attempt.request_id != grant.request_id:
            raise Forbidden("the grant is of another request", code="grant_invalid")
        if not 0 <= run.group < len(kv_format.block_sizes):
            raise ProtocolError(f"there is no layer group {run.group}")
        block_size = kv_format.block_sizes[run.group]
        if not run.blocks or len(run.token_ids) != len(run.blocks) * block_size * TOKEN_BYTES:
            raise ProtocolError(f"{len(run.token_ids)} bytes of tokens do not fill {len(run.blocks)} blocks")
        scope, key = await self._scope(grant, kv_format)
        self.issued.check_parent(scope, run.group, run.parent)
        tags = tag_chain(key, run.group, block_size, run.token_ids, run.parent)
        self.issued.remember(scope, run.group, tags)
        return tuple(tags)

    async def _scope(self, grant: Grant, kv_format: KvFormat) -> tuple[str, bytes]:
        self.generations.check(grant.scope)
        scope = scope_id(grant.scope, kv_format)
        key = await self.keys.key(grant.tenant, scope, grant.scope.generation)
        # The scope may have ended while the key was read.
        self.generations.check(grant.scope)
        if grant.scope.salt:
            return salted(scope, grant.scope.salt), salted_key(key, grant.scope.salt)
        return scope, key
