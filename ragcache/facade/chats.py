"""Conversations in the words of the model's own chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ragcache.config import check_mode
from ragcache.pipeline import (
    GREEDY,
    Answer,
    AnswerStream,
    Asked,
    AsyncAnswerStream,
    ChatOptions,
    Conversation,
    Generation,
    Parts,
)
from ragcache.pipeline.asked import awaited, results

Tools = Sequence[Mapping[str, Any]] | None
"""JSON descriptions of functions, as Hugging Face's chat templates take them."""


class Chats:
    """The methods of `RagCache` that continue conversations and plain texts."""

    _parts: Parts

    def chat(
        self, messages: Conversation, *, mode: str = "rooted", recognize: bool = True,
        tools: Tools = None, generation: Generation = GREEDY,
    ) -> Answer:  # fmt: skip
        """Answers a conversation, in the words of the model's own chat template.

        messages: `{"role": "system|user|assistant|tool", "content": text}`, or a text that is
        continued as it stands. Control tokens come from the template alone: in contents and plain
        texts they are ordinary characters. Raises `RequestError`, or `UnsupportedModel` where the
        template has no place for `tools`.

        recognize: texts of ingested modules that stand in the prompt are read from their kept
        states, whichever collection they belong to; `answer.sources` lists them in the order of the
        prompt. A text may lack the module's outer whitespace, but must agree with it inside; those
        under 32 characters are not looked for.

        mode: how they were encoded: `rooted`, after the preamble of the collections' prompts, or
        `isolated`. In a chat they stand after another beginning, so the answer may differ from that
        of `exact`, which computes everything. `linked:N` computes the first N tokens of each again.
        `answer.mode` is `recognized:MODE` where states were reused, else `exact`.
        """
        return self.stream_chat(
            messages, mode=mode, recognize=recognize, tools=tools, generation=generation
        ).result()

    def chat_batch(
        self, conversations: Sequence[Conversation], *, mode: str = "rooted",
        recognize: bool = True, tools: Tools = None, generation: Generation = GREEDY,
    ) -> list[Answer]:  # fmt: skip
        """Answers conversations together: every module that several share is read once a step."""
        return results(self._start_chats(conversations, mode, recognize, tools, generation))

    def stream_chat(
        self, messages: Conversation, *, mode: str = "rooted", recognize: bool = True,
        tools: Tools = None, generation: Generation = GREEDY,
    ) -> AnswerStream:  # fmt: skip
        """As `chat`, but returns when the conversation is queued; iterate for the text as it
        comes."""
        [asked] = self._start_chats([messages], mode, recognize, tools, generation)
        return AnswerStream(asked)

    def stream_chat_batch(
        self, conversations: Sequence[Conversation], *, mode: str = "rooted",
        recognize: bool = True, tools: Tools = None, generation: Generation = GREEDY,
    ) -> list[AnswerStream]:  # fmt: skip
        """As `chat_batch`, but returns when all conversations are queued."""
        asked = self._start_chats(conversations, mode, recognize, tools, generation)
        return [AnswerStream(each) for each in asked]

    async def achat(
        self, messages: Conversation, *, mode: str = "rooted", recognize: bool = True,
        tools: Tools = None, generation: Generation = GREEDY,
    ) -> Answer:  # fmt: skip
        """`chat` for asyncio."""
        return await (
            await self.astream_chat(
                messages, mode=mode, recognize=recognize, tools=tools, generation=generation
            )
        )

    async def achat_batch(
        self, conversations: Sequence[Conversation], *, mode: str = "rooted",
        recognize: bool = True, tools: Tools = None, generation: Generation = GREEDY,
    ) -> list[Answer]:  # fmt: skip
        """`chat_batch` for asyncio."""
        arguments = (conversations, mode, recognize, tools, generation)
        return await awaited(await asyncio.to_thread(self._start_chats, *arguments))

    async def astream_chat(
        self, messages: Conversation, *, mode: str = "rooted", recognize: bool = True,
        tools: Tools = None, generation: Generation = GREEDY,
    ) -> AsyncAnswerStream:  # fmt: skip
        """`stream_chat` for asyncio."""
        arguments = ([messages], mode, recognize, tools, generation)
        [asked] = await asyncio.to_thread(self._start_chats, *arguments)
        return AsyncAnswerStream(asked)

    async def astream_chat_batch(
        self, conversations: Sequence[Conversation], *, mode: str = "rooted",
        recognize: bool = True, tools: Tools = None, generation: Generation = GREEDY,
    ) -> list[AsyncAnswerStream]:  # fmt: skip
        """`stream_chat_batch` for asyncio."""
        arguments = (conversations, mode, recognize, tools, generation)
        asked = await asyncio.to_thread(self._start_chats, *arguments)
        return [AsyncAnswerStream(each) for each in asked]

    def _start_chats(
        self, conversations: Sequence[Conversation], mode: str, recognize: bool, tools: Tools,
        generation: Generation,
    ) -> list[Asked]:  # fmt: skip
        checked = check_mode(mode)
        self._parts.returned.release()
        options = ChatOptions(checked, recognize, tools)
        return self._parts.chats.start(conversations, options, generation)
