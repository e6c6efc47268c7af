"""Prompts to token ids, in threads of their own: a long prompt must not stop the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from services.gateway.openai_schema import ChatRequest, GenerationRequest
from shared.text.chat_prompt import encode_chat
from shared.text.tokenizer import Tokenizer

NUM_THREADS = 2


class PromptCodec:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    async def encode(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids. Raises InvalidInput naming `messages` or `prompt`."""
        if not isinstance(request, ChatRequest) and not isinstance(request.prompt, str):
            return list(request.prompt)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, request)

    def _encode(self, request: GenerationRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            messages = [message.model_dump() for message in request.messages]
            return encode_chat(self.tokenizer, messages, now=datetime.now())
        assert isinstance(request.prompt, str)
        return self.tokenizer.encode(request.prompt, parse_special=True)

    def close(self) -> None:
        """End the threads; encodings in progress finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)
