"""`ragcache chat`: a conversation in the terminal, over the documents of a collection."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.errors import PromptTooLong, RequestError
from ragcache.modes import ROOTED, ReuseMode
from ragcache_api.cli import console as ui

if TYPE_CHECKING:
    from ragcache import Answer, GenerationParams, RagCache

_PROMPT = "> "


def chat(
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", help="Where to look; else the model alone.")
    ] = None,
    state: ui.StateOption = ui.DEFAULT_STATE,
    k: ui.KOption = DEFAULT_K,
    relative_threshold: ui.RelativeThresholdOption = DEFAULT_RELATIVE_THRESHOLD,
    mode: ui.ModeOption = ROOTED,
    wanted: ui.FilterOption = None,
    max_tokens: ui.MaxTokensOption = None,
    temperature: ui.TemperatureOption = None,
    seed: ui.SeedOption = None,
    confidence: ui.ConfidenceOption = None,
    min_confidence: ui.MinConfidenceOption = None,
    refusal: ui.RefusalOption = None,
    model: ui.ModelOption = None,
    dtype: ui.DTypeOption = "auto",
    embedding: ui.EmbeddingOption = None,
    reranker: ui.RerankerOption = None,
    instruction: ui.InstructionOption = None,
    force_modes: ui.ForceModesOption = False,
) -> None:
    """Talk with the model about the documents of a collection. An empty line or Ctrl-D ends it.

    Each message is answered from the modules that it retrieves; what was said before is kept, and
    forgotten from the front where it no longer fits the model's window.
    """
    with ui.open_existing_rag(
        state,
        model,
        embedding,
        collection,
        dtype=dtype,
        instruction=instruction,
        reranker=reranker,
        force_modes=force_modes,
    ) as rag:
        from ragcache import GenerationParams

        options: dict[str, Any] = {
            "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
            "confidence": confidence, "min_confidence": min_confidence, "refusal": refusal,
        }  # fmt: skip
        generation = GenerationParams(**options)
        search = {"k": k, "filters": wanted, "relative_threshold": relative_threshold}
        talk = Talk(rag, collection, search, mode, generation)
        for text in _typed():
            try:
                talk.say(text)
            except RequestError as error:  # the conversation goes on without this message
                ui.errors.print(f"{type(error).__name__}: {error}", markup=False)
        command = ui.warm_command(
            collection or "COLLECTION", mode, state=state, model=model, dtype=dtype,
            instruction=instruction,
        )  # fmt: skip
        ui.print_unkept(rag, f"{command} keeps those of a collection")


class Talk:
    """A conversation: messages without the documents that each was answered from."""

    def __init__(
        self, rag: RagCache, collection: str | None, search: dict[str, Any], mode: ReuseMode,
        generation: GenerationParams,
    ) -> None:  # fmt: skip
        """search: options of `RagCache.retrieve`."""
        self.said: list[dict[str, str]] = []
        self._rag, self._collection, self._search = rag, collection, search
        self._mode, self._generation = mode, generation

    def say(self, text: str) -> None:
        """Answers a message and prints the answer as it comes, with its sources."""
        message = {"role": "user", "content": self._with_documents(text)}
        answer = self._answer(message)
        self.said += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer.text},
        ]

    def _answer(self, message: dict[str, str]) -> Answer:
        """The answer after as much of the conversation as fits. Raises `PromptTooLong` where the
        message alone does not."""
        while True:
            try:
                stream = self._rag.stream_chat(
                    [*self.said, message], mode=self._mode, generation=self._generation
                )
            except PromptTooLong:
                if not self.said:
                    raise
                del self.said[:2]
                ui.errors.print("[dim]the oldest question is forgotten: the window is full[/]")
                continue
            ui.print_answer(stream, pieces=True)
            return stream.answer

    def _with_documents(self, text: str) -> str:
        """The message with the modules that it retrieves."""
        from ragcache.evaluation import PASTED

        if self._collection is None:
            return text
        hits = self._rag.retrieve(text, collection=self._collection, **self._search).hits
        found = "\n\n".join(hit.module.text.strip() for hit in hits)
        return PASTED.format(documents=found, question=text) if hits else text


def _typed() -> Iterator[str]:
    """Lines of standard input up to an empty one; a terminal shows a prompt and edits lines."""
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
