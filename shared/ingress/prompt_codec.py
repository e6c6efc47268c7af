"""Bodies to requests and prompts to token ids; long ones in threads of their own, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar

from shared.contracts.errors import ContextExceeded, InvalidInput
from shared.ingress.openai_schema import ChatRequest, GenerationRequest
from shared.text.chat_prompt import encode_chat
from shared.text.chat_template import check_template
from shared.text.tokenizer import Tokenizer

NUM_THREADS = 2
SHORT_BODY_BYTES = 64 * 1024
"""A body up to this size is parsed at once: a thread would cost more than it spares."""

Request = TypeVar("Request", bound=GenerationRequest)


class PromptCodec:
    """One model's tokenizer and chat template.

    Args:
        context: most tokens of prompt and output together.

    Raises SettingsError for a chat template that does not compile.
    """

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        if tokenizer.chat_template is not None:
            check_template(tokenizer.chat_template)
        self.tokenizer = tokenizer
        self._context = context
        # a longer text has more tokens than the context, so it need not be tokenized to be refused
        self._max_chars = context * tokenizer.longest_token
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    async def parse(self, parse: Callable[[bytes], Request], body: bytes) -> Request:
        """`parse(body)`. Raises what it raises."""
        if len(body) <= SHORT_BODY_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)

    async def encode(self, request: GenerationRequest) -> list[list[int]]:
        """Each prompt's token ids; a chat has one.

        Raises InvalidInput naming `messages` or `prompt`; ContextExceeded for a text that is far too long.
        """
        if not isinstance(request, ChatRequest) and not any(isinstance(prompt, str) for prompt in request.prompt):
            return self.encode_now(request)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode_now, request)

    def encode_now(self, request: GenerationRequest) -> list[list[int]]:
        """As `encode`, on the caller's own thread."""
        if isinstance(request, ChatRequest):
            return [self._encode_chat(request)]
        return [self._encode_prompt(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompt]

    def _encode_chat(self, request: ChatRequest) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise InvalidInput("this model has no chat template; use /v1/completions", param="messages")
        messages = [message.model_dump() for message in request.messages]
        return encode_chat(self.tokenizer, messages, now=datetime.now(), max_chars=self._max_chars)

    def _encode_prompt(self, prompt: str) -> list[int]:
        if len(prompt) > self._max_chars:
            raise ContextExceeded(
                f"this model's context is {self._context} tokens; the prompt has {len(prompt)} characters",
                param="prompt",
            )
        return self.tokenizer.encode_prompt(prompt)

    def close(self) -> None:
        """End the threads; encodings in progress finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)
