"""`ragcache chat`: a conversation in the terminal, over the documents of a collection."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ragcache.errors import PromptTooLong, RequestError
from ragcache.modes import ROOTED, ReuseMode
from ragcache.params import GenerationParams, SearchParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ASKING, ONE_ANSWER, expand_options
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache import Answer, AnswerStream, RagCache

_PROMPT = "> "


@expand_options
def chat(
    params: Annotated[GenerationParams, ONE_ANSWER],
    search: SearchParams,
    options: Annotated[ServiceOptions, ASKING],
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", help="Where to look; else the model alone.")
    ] = None,
    mode: ui.ModeOption = ROOTED,
) -> None:
    """Talk with the model about the documents of a collection. An empty line or Ctrl-D ends it.

    Each message is answered from the modules that it retrieves. Earlier messages are kept; the
    oldest are dropped once the conversation exceeds the model's window.
    """
    with ui.open_existing_rag(options, collection) as rag:
        talk = Talk(rag, collection, search, mode, params)
        for text in _typed():
            try:
                talk.say(text)
            except RequestError as error:  # the conversation goes on without this message
                ui.errors.print(f"{type(error).__name__}: {error}", markup=False)
        command = ui.warm_command(collection or "COLLECTION", mode, options)
        ui.print_unkept(rag, f"{command} keeps those of a collection")


class Talk:
    """A conversation, as messages without the retrieved documents."""

    def __init__(
        self,
        rag: RagCache,
        collection: str | None,
        search: SearchParams,
        mode: ReuseMode,
        generation: GenerationParams,
    ) -> None:
        self.said: list[dict[str, str]] = []
        self._rag, self._collection = rag, collection
        self._search = {} if collection is None else search.given()
        self._mode, self._generation = mode, generation
        self._noted = False  # whether the advice on a model has been printed

    def say(self, text: str) -> None:
        """Answer a message. Prints the answer as it arrives, then its sources."""
        answer = self._answer({"role": "user", "content": text})
        self.said += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer.text},
        ]

    def _answer(self, message: dict[str, str]) -> Answer:
        """Answer a message after as much of the conversation as fits the model's window.

        Raises:
            PromptTooLong: The message alone does not fit.
        """
        while True:
            try:
                stream = self._rag.stream_chat(
                    [*self.said, message],
                    collection=self._collection,
                    mode=self._mode,
                    generation=self._generation,
                    **self._search,
                )
                if not self.said or self._leaves_room(stream):
                    ui.print_answer(stream, pieces=True)
                    if self._collection is not None and not self._noted:
                        self._noted = ui.print_reader_note(
                            self._rag, self._collection, stream.answer
                        )
                    return stream.answer
                stream.close()
            except PromptTooLong:
                if not self.said:
                    raise
            del self.said[:2]
            ui.errors.print("[dim]the oldest question is forgotten: the window is full[/]")

    def _leaves_room(self, stream: AnswerStream) -> bool:
        """Tell whether an answer can have as many tokens as the options allow."""
        shared = self._rag.internals.shared
        most = self._generation.token_limit(shared.config.max_tokens)
        return stream.prompt_tokens + most <= shared.model.causal.window


def _typed() -> Iterator[str]:
    """Yield lines of standard input up to an empty one. A terminal shows a prompt."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if not line.strip():
                return
            yield line.strip()
        return
    import readline  # noqa: F401  # `input` edits lines with it

    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            return
        if not line:
            return
        yield line
