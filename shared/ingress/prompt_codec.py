"""Bodies to requests and prompts to token ids; long ones in threads of their own, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar

from shared.contracts.errors import ContextExceeded, InvalidInput
from shared.grammar.compiler import SLOW_S, GrammarCompiler
from shared.grammar.source import schema_grammar
from shared.ingress.openai_schema import ChatRequest, CompletionRequest, GenerationRequest
from shared.ingress.structure import ModelForm, Structure, active_tools, structure_of
from shared.lifecycle.memory import GIVE_BACK, keep_little
from shared.text.chat_prompt import encode_chat, prepare
from shared.text.tokenizer import Tokenizer
from shared.tools.formats import ReasoningSetting, ToolSetting, reads_tools, thinks, tool_format
from shared.tools.prompt import tell_tools

NUM_THREADS = 2
PROMPT_END = 16
"""Tokens at the end of a prompt that tell whether it opened the model's thoughts."""
SHORT_BODY_BYTES = 64 * 1024
"""A body up to this size is parsed at once: a thread would cost more than it spares."""
SHORT_TEXT_CHARS = 512
"""So much text is tokenized at once, in some ten microseconds: going to a thread and back takes three hundred."""
SHORT_CHAT_MESSAGES = 8
"""A chat of so many short messages is rendered at once: to render is Python, which a thread would do no sooner."""

Parsed = TypeVar("Parsed")


class PromptCodec:
    """One model's tokenizer and chat template.

    Args:
        context: most tokens of prompt and output together.
        tools: how the model calls tools; auto: as its chat template says.
        reasoning: whether it thinks aloud first; auto: as its chat template says.

    Raises SettingsError for a chat template that does not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: int,
        *,
        tools: ToolSetting = "auto",
        reasoning: ReasoningSetting = "auto",
    ) -> None:
        template = tokenizer.chat_template
        prepare(tokenizer)
        special = {text: token.id for text, token in tokenizer.special_tokens.items()}
        self.form = ModelForm(tool_format(tools, template), thinks(reasoning, template), special)
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self.tokenizer = tokenizer
        self._context = context
        # a longer text has more tokens than the context, so it need not be tokenized to be refused
        self._max_chars = context * tokenizer.longest_token
        keep_little()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    async def parse(self, parse: Callable[[bytes], Parsed], body: bytes) -> Parsed:
        """`parse(body)`. Raises what it raises."""
        if len(body) <= SHORT_BODY_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)

    async def encode(self, request: GenerationRequest) -> list[list[int]]:
        """Each prompt's token ids; a chat has one.

        Raises InvalidInput naming `messages` or `prompt`, or what asks for an output that cannot be had;
        ContextExceeded for a text that is far too long.
        """
        if _is_short(request):
            return self.encode_now(request)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode_now, request)
        finally:
            GIVE_BACK.after(_size(request))

    def encode_now(self, request: GenerationRequest) -> list[list[int]]:
        """As `encode`, on the caller's own thread."""
        if isinstance(request, ChatRequest):
            prompts = [self._encode_chat(request)]
            if request.prediction is not None:
                request.know_prediction(self._encode_prediction(request.prediction.text))
        else:
            prompts = [self._encode_prompt(p) if isinstance(p, str) else list(p) for p in request.prompt]
        structure = self.structure(request, prompts[0])
        if structure.grammar:
            self._require(structure)
        return prompts

    def _require(self, structure: Structure) -> None:
        compiler = self._get_compiler()
        try:
            compiler.require(structure.grammar, structure.field)
        except InvalidInput:
            # one of several schemas may be the one at fault; to find it is not worth much work
            end = time.thread_time() + SLOW_S
            for field, schema in structure.schemas.items():
                if time.thread_time() < end:
                    compiler.require(schema_grammar(schema, field), field)
            raise

    def structure(self, request: GenerationRequest, prompt: Sequence[int]) -> Structure:
        """The form and the grammar of a request's outputs. Raises InvalidInput as `structure_of`."""
        end = self.tokenizer.decode(prompt[-PROMPT_END:], skip_special=False) if self.form.thinks else ""
        return structure_of(request, self.form, end)

    def _get_compiler(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer, slow_s=SLOW_S)
            return self._compiler

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special ones left out."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.tokenizer.decode, token_ids)

    def _encode_chat(self, request: ChatRequest) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise InvalidInput("this model has no chat template; use /v1/completions", param="messages")
        messages = [message.for_template() for message in request.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in active_tools(request)]
        if not reads_tools(self.tokenizer.chat_template):
            messages, tools = tell_tools(messages, tools), []
        return encode_chat(self.tokenizer, messages, now=datetime.now(), tools=tools or None, max_chars=self._max_chars)

    def _encode_prediction(self, text: str) -> list[int]:
        if len(text) > self._max_chars:
            message = f"prediction: this model's context is {self._context} tokens; this has {len(text)} characters"
            raise InvalidInput(message, param="prediction")
        return self.tokenizer.encode(text)[: self._context]

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


def _size(request: GenerationRequest) -> int:
    """Characters that were tokenized, or somewhat more."""
    if isinstance(request, CompletionRequest):
        return sum(map(len, request.prompt))
    contents = (message.content or "" for message in request.messages)
    sizes = (len(c) if isinstance(c, str) else sum(len(part["text"]) for part in c) for c in contents)
    return sum(sizes) + (len(request.prediction.text) if request.prediction is not None else 0)


def _is_short(request: GenerationRequest) -> bool:
    """True when next to nothing is to be rendered and tokenized, and no grammar to be compiled."""
    if request.structured_outputs is not None:
        return False
    if isinstance(request, CompletionRequest):
        return sum(len(prompt) for prompt in request.prompt if isinstance(prompt, str)) <= SHORT_TEXT_CHARS
    if request.response_format or request.tools or request.prediction or len(request.messages) > SHORT_CHAT_MESSAGES:
        return False
    chars = 0
    for message in request.messages:
        if message.tool_calls or message.reasoning_content or not isinstance(message.content, str):
            return False
        chars += len(message.content)
    return chars <= SHORT_TEXT_CHARS
