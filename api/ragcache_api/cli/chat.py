"""`ragcache chat`: a conversation in the terminal, over the documents of a collection."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcache.errors import PromptTooLong, RequestError, ServiceFailed
from ragcache.modes import ReuseMode
from ragcache.params import GenerationParams, SearchParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ASKING, ONE_ANSWER, expand_options
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache import Answer, AnswerStream, RagCache
    from ragcache_api.cli.served import ServedAnswer

_PROMPT = "> "
Messages = list[dict[str, str]]


@expand_options
def chat(
    params: Annotated[GenerationParams, ONE_ANSWER],
    search: SearchParams,
    options: Annotated[ServiceOptions, ASKING],
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", help="Where to look; else the model alone.")
    ] = None,
    mode: ui.ModeOption = None,
    server: ui.ServerOption = None,
    key: ui.KeyOption = None,
) -> None:
    """Talk with the model about the documents of a collection. An empty line or Ctrl-D ends it.

    Each message is answered from the modules that it retrieves. Earlier messages are kept; the
    oldest are dropped once the conversation exceeds the model's window. With --server, a running
    service answers, and no model is loaded.
    """
    if server is not None:
        body = {"collection": collection, **params.given(), **search.given()}
        if mode is not None:
            body["mode"] = str(mode)
        _converse(ServedTalk(server, key, body))
        return
    with ui.open_existing_rag(options, collection) as rag:
        _converse(LocalTalk(rag, collection, search, mode, params))
        command = ui.warm_command(collection or "COLLECTION", mode, options)
        ui.print_unkept(rag, f"{command} keeps those of a collection")


def _converse(talk: Talk) -> None:
    """Answer the messages that the user types.

    A message that fails leaves the conversation as it was. A service that fails before its first
    answer ends it: its URL, key or collection is wrong.
    """
    for text in _typed():
        try:
            talk.say(text)
        except (RequestError, ServiceFailed) as error:
            if isinstance(error, ServiceFailed) and not talk.said:
                raise
            ui.print_error(error)


class Talk(ABC):
    """A conversation, as messages without the retrieved documents."""

    def __init__(self) -> None:
        self.said: Messages = []

    def say(self, text: str) -> Any:
        """Answer a message. Prints the answer as it arrives, then its sources; returns it."""
        message = {"role": "user", "content": text}
        stream = self._open(message)
        ui.print_answer(stream, pieces=True)
        answer = stream.answer
        self.said += [message, {"role": "assistant", "content": answer.text}]
        return answer

    def _open(self, message: dict[str, str]) -> AnswerStream | ServedAnswer:
        """Begin to answer a message after as much of the conversation as fits the model's window.

        Raises:
            PromptTooLong: The message alone does not fit.
        """
        while True:
            try:
                if stream := self.stream([*self.said, message]):
                    return stream
            except PromptTooLong:
                if not self.said:
                    raise
            del self.said[:2]
            ui.errors.print("[dim]the oldest question is forgotten: the window is full[/]")

    @abstractmethod
    def stream(self, messages: Messages) -> AnswerStream | ServedAnswer | None:
        """Begin to answer messages, or return None if the window leaves no room for an answer.

        Raises:
            PromptTooLong: The messages do not fit the model's window.
        """


class LocalTalk(Talk):
    """A conversation with a state folder."""

    def __init__(
        self,
        rag: RagCache,
        collection: str | None,
        search: SearchParams,
        mode: ReuseMode | None,
        generation: GenerationParams,
    ) -> None:
        super().__init__()
        self._rag, self._collection = rag, collection
        self._search = {} if collection is None else search.given()
        self._mode, self._generation = mode, generation
        self._noted = False  # whether the advice on a model has been printed

    def say(self, text: str) -> Answer:
        """Answer a message. Advises a model, once, where the embedded reader refuses."""
        answer: Answer = super().say(text)
        if self._collection is not None and not self._noted:
            self._noted = ui.print_reader_note(self._rag, self._collection, answer)
        return answer

    def stream(self, messages: Messages) -> AnswerStream | None:
        """Begin to answer messages from the state folder."""
        stream = self._rag.stream_chat(
            messages,
            collection=self._collection,
            mode=self._mode,
            generation=self._generation,
            **self._search,
        )
        if len(messages) == 1 or self._leaves_room(stream):
            return stream
        stream.close()
        return None

    def _leaves_room(self, stream: AnswerStream) -> bool:
        """Tell whether an answer can have as many tokens as the options allow."""
        shared = self._rag.internals.shared
        most = self._generation.token_limit(shared.config.max_tokens)
        return stream.prompt_tokens + most <= shared.model.causal.window


class ServedTalk(Talk):
    """A conversation with a running service, which limits an answer to the room that is left."""

    def __init__(self, server: str, key: str | None, body: dict[str, Any]) -> None:
        super().__init__()
        self._server, self._key, self._body = server, key, body

    def stream(self, messages: Messages) -> ServedAnswer:
        """Send messages to the service."""
        from ragcache_api.cli.served import ServedAnswer

        return ServedAnswer.chat(self._server, self._key, {**self._body, "messages": messages})


def _typed() -> Iterator[str]:
    """Yield lines of standard input up to an empty one. A terminal shows a prompt."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if not line.strip():
                return
            yield line.strip()
        return
    import readline  # noqa: F401  # `input` edits lines with it

    ui.errors.print("[dim]an empty line or Ctrl-D ends the conversation[/]")
    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            return
        if not line:
            return
        yield line
