"""Hand-written PML: schemas, and prompts that import their modules."""

from __future__ import annotations

import asyncio
from typing import get_args

from ragcache.config import check_mode
from ragcache.errors import ConfigurationError
from ragcache.pipeline import (
    GREEDY,
    Answer,
    AnswerStream,
    Asked,
    AsyncAnswerStream,
    Generation,
    Parts,
)
from ragcache_schemas import Placement, Schema


class Prompts:
    """The methods of `RagCache` that store schemas and answer PML prompts."""

    _parts: Parts

    def add_schema(
        self, text: str, *, placement: Placement = "schema", source: str = "<string>"
    ) -> Schema:
        """Stores a hand-written PML schema and encodes its modules (Prompt Cache §3.3).

        placement: `schema`, the paper's fixed positions, or `compact`, which moves modules so that
        a prompt has no gaps. source: a file name, for errors. A schema of the same name is
        replaced. Raises `PMLError`.
        """
        if placement not in get_args(Placement):
            raise ConfigurationError(
                f"unknown placement {placement!r}; placements: {', '.join(get_args(Placement))}"
            )
        self._parts.returned.release()
        return self._parts.prompts.add(text, source, placement)

    def schemas(self) -> list[str]:
        """The names of the schemas."""
        return self._parts.prompts.texts.names()

    def delete_schema(self, name: str) -> None:
        """Deletes a schema with its modules' states. Raises `UnknownSchema`."""
        self._parts.prompts.delete(name)

    def prompt(
        self, text: str, *, mode: str = "isolated", source: str = "<string>",
        generation: Generation = GREEDY,
    ) -> Answer:  # fmt: skip
        """Answers a PML prompt (§3.4): imported modules are read, arguments and new text computed.

        mode: `isolated`, or `exact`, which computes everything. Raises `PMLError`, `UnknownSchema`
        or `RequestError`.
        """
        return self.stream_prompt(text, mode=mode, source=source, generation=generation).result()

    def stream_prompt(
        self, text: str, *, mode: str = "isolated", source: str = "<string>",
        generation: Generation = GREEDY,
    ) -> AnswerStream:  # fmt: skip
        """As `prompt`, but returns when the prompt is queued."""
        return AnswerStream(self._start_prompt(text, mode, source, generation))

    async def aprompt(
        self, text: str, *, mode: str = "isolated", source: str = "<string>",
        generation: Generation = GREEDY,
    ) -> Answer:  # fmt: skip
        """`prompt` for asyncio."""
        return await (
            await self.astream_prompt(text, mode=mode, source=source, generation=generation)
        )

    async def astream_prompt(
        self, text: str, *, mode: str = "isolated", source: str = "<string>",
        generation: Generation = GREEDY,
    ) -> AsyncAnswerStream:  # fmt: skip
        """`stream_prompt` for asyncio."""
        arguments = (text, mode, source, generation)
        return AsyncAnswerStream(await asyncio.to_thread(self._start_prompt, *arguments))

    def _start_prompt(self, text: str, mode: str, source: str, generation: Generation) -> Asked:
        checked = check_mode(mode)
        self._parts.returned.release()
        return self._parts.prompts.start(text, checked, generation, source)
