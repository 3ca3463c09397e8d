"""A folder with a hybrid model: questions and chats in `exact`, which share prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import ModeRefused, UnsupportedModel
from ragcache.models import LoadedModel, wrap_causal
from ragcache.modes import EXACT, ROOTED
from tests.ragcache.pipeline.conftest import DOCUMENTS
from tests.tiny_hybrids import tiny_hybrid


@pytest.fixture(scope="module")
def hybrid(reader: LoadedModel) -> LoadedModel:
    sizes = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 4096}
    return LoadedModel("hybrid", wrap_causal(tiny_hybrid("lfm2", **sizes)), reader.tokenizer)


@pytest.fixture
def rag(tmp_path: Path, hybrid: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", hybrid, max_tokens=4, private_bytes="64MB") as opened:
        yield opened


def test_a_question_is_answered_in_exact(rag: RagCache) -> None:
    ingested = rag.ingest("notes", DOCUMENTS)
    assert (ingested.added, ingested.modules, ingested.encoded) == (3, 3, 0)
    question = "Where does the spare key of the boathouse hang, and who keeps the key figures?"
    first = rag.ask(question, collection="notes", k=3)
    assert (first.mode, first.reuse.replaced_mode) == ("exact", "rooted")
    assert first.sources[0].document == "keys"
    exact = rag.ask(question, collection="notes", k=3, mode="exact")
    assert (exact.text, exact.reuse.replaced_mode) == (first.text, None)
    again = rag.ask(question, collection="notes", k=3)
    assert again.text == first.text
    assert again.reuse.shared_tokens > exact.reuse.shared_tokens == 0


def test_the_next_turn_of_a_chat_shares_the_one_before(rag: RagCache) -> None:
    messages = [{"role": "user", "content": " ".join(d.text for d in DOCUMENTS * 3)}]
    first = rag.chat(messages)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Where is the boat?"},
    ]
    assert rag.chat(messages).reuse.shared_tokens >= 64


def test_a_mode_that_reads_states_is_refused_by_the_gate(rag: RagCache) -> None:
    with pytest.raises(ModeRefused, match=r"mode 'rooted' is refused .* recurrent layers"):
        rag.gate.check_mode(ROOTED)
    rag.gate.check_mode(EXACT)
    assert rag.gate.measure([ROOTED]) == [None]


def test_states_of_modules_are_refused(rag: RagCache) -> None:
    rag.ingest("notes", DOCUMENTS)
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        rag.modules.warm("notes")
