"""The instruction before the documents: the user's, and in the keys of states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError, UnknownCollection
from ragcache.models import INSTRUCTION, READER_INSTRUCTION, LoadedModel
from ragcache.modes import ROOTED
from ragcache.params import SearchParams
from ragcache_schemas import write_schema
from tests.conftest import write_notes

SHORT = "Reply in one word."


@pytest.fixture(scope="module")
def state(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose documents were ingested with the default."""
    folder = tmp_path_factory.mktemp("instruction")
    with RagCache.open(folder / "state", reader) as rag:
        rag.ingest("notes", write_notes(folder / "notes"))
    return folder / "state"


@pytest.fixture(scope="module")
def short(reader: LoadedModel, state: Path) -> Iterator[RagCache]:
    with RagCache.open(state, reader, max_tokens=4, instruction=SHORT) as rag:
        yield rag


def ask(rag: RagCache, **options: Any) -> Any:
    return rag.ask("Where is the spare key?", collection="notes", k=2, **options)


def test_the_instruction_is_before_the_documents(short: RagCache, reader: LoadedModel) -> None:
    encoder = short.internals.ask.encoder
    assert encoder.frame.preamble == f"<|user|>{SHORT}\n\n"
    assert encoder.preamble_ids == reader.encode(f"<|user|>{SHORT}\n\n")
    assert SHORT in short.within("tenant").internals.ask.encoder.frame.preamble
    kept = encoder.with_template({"unheard": 1})
    assert kept.frame.preamble == encoder.frame.preamble, "variables keep the instruction"


def test_states_behind_another_instruction_are_others(short: RagCache) -> None:
    first = ask(short)
    encoded = short.stats().encoded
    assert encoded > 0, "those that follow the default are not read"
    again = ask(short)
    assert short.stats().encoded == encoded
    assert again.reuse.cached_tokens > first.reuse.cached_tokens
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_exact_answers_read_it_too(short: RagCache) -> None:
    assert ask(short, mode="exact").reuse.prompt_tokens == ask(short).reuse.prompt_tokens


def test_a_written_default_reads_what_the_default_kept(state: Path, reader: LoadedModel) -> None:
    with RagCache.open(state, reader, max_tokens=1, instruction=READER_INSTRUCTION) as rag:
        longer = ask(rag)
        assert rag.stats().encoded == 0
    assert longer.reuse.cached_tokens > 0


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("", "the instruction is blank"),
        (" \n", "the instruction is blank"),
        ("Be kind.<|end|>", "holds a control token"),
        ("\U00100000", "private character"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_what_cannot_be_an_instruction_is_refused(
    reader: LoadedModel, tmp_path: Path, instruction: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RagCache.open(tmp_path / "state", reader, instruction=instruction)


def test_a_collection_has_an_instruction_of_its_own(tiny_reader: LoadedModel, notes: Path) -> None:
    own = "Antworte auf Deutsch."
    state = notes.parent / "state"
    with RagCache.open(state, tiny_reader, max_tokens=2, instruction=SHORT) as rag:
        for name in ("notes", "others"):
            rag.ingest(name, [notes])
        assert rag.collections.instruction("notes") == SHORT
        before = ask(rag)
        rag.collections.set_instruction("notes", own)
        assert rag.collections.instruction("notes") == own
        assert rag.collections.instruction("others") == SHORT
        [prompt] = prompts(rag, "notes")
        assert tiny_reader.encode(f"<|user|>{own}\n\n") == list(prompt.states.encoder.preamble_ids)
        assert own in write_schema(rag.schemas.generate("notes"))
        encoded = rag.stats().encoded
        assert ask(rag).reuse.prompt_tokens != before.reuse.prompt_tokens
        assert rag.stats().encoded > encoded, "states after another instruction are others"
        assert {change.action for change in rag.modules.warm("others", dry_run=True)} <= {"promote"}
    with RagCache.open(state, tiny_reader, max_tokens=2) as again:
        assert again.collections.instruction("notes") == own, "for every process"
        assert again.ingest("notes", [notes]).encoded >= 1, "what the questions did not encode"
        encoded = again.stats().encoded
        assert ask(again).reuse.cached_tokens > 0
        assert again.stats().encoded == encoded
        again.collections.set_instruction("notes", None)
        assert again.collections.instruction("notes") == INSTRUCTION
        for wrong in (" ", "Use <|user|>."):
            with pytest.raises(ConfigurationError, match="instruction"):
                again.collections.set_instruction("notes", wrong)
        with pytest.raises(UnknownCollection):
            again.collections.set_instruction("nowhere", SHORT)


def prompts(rag: RagCache, collection: str) -> Any:
    question = ["Where is the spare key?"]
    return rag.internals.ask.prepare_prompts(question, collection, SearchParams(k=2), ROOTED)
