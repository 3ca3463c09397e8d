"""Variables of the chat template: in every prompt or in one call, and in the keys of states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache import GenerationParams, RagCache
from ragcache.errors import ConfigurationError, InvalidRequest
from ragcache.models import LoadedModel
from ragcache.pipeline import ChatTemplate
from tests.conftest import write_notes

TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' }}{% if effort is defined %}"
    "{{ 'Effort: ' + effort + '. ' }}{% endif %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '(no thoughts) ' }}{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "Where is the spare key?"}]
QUIET = {"enable_thinking": False}


@pytest.fixture(scope="module")
def thinking(reader: LoadedModel) -> LoadedModel:
    """The reader, with a template that takes two variables."""
    tokenizer = copy.deepcopy(reader.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return LoadedModel("thinking", reader.causal, tokenizer)


@pytest.fixture(scope="module")
def rag(thinking: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    folder = tmp_path_factory.mktemp("kwargs")
    with RagCache.open(folder / "state", thinking, max_tokens=4) as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
        yield opened


def ask(rag: RagCache, **options: Any) -> Any:
    return rag.ask("Where is the spare key?", collection="notes", k=2, **options)


def test_the_tokens_are_those_of_hugging_face(thinking: LoadedModel) -> None:
    for kwargs in (QUIET, {"effort": "low"}, {"effort": "high", **QUIET}):
        expected = thinking.tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True, return_dict=False, **kwargs
        )
        template = ChatTemplate(thinking)
        assert template.encode(template.render_chat(CHAT, kwargs=kwargs)) == expected
        of_all = ChatTemplate(thinking, kwargs)
        assert of_all.encode(of_all.render_chat(CHAT)) == expected
    template = ChatTemplate(thinking, {"effort": "low"})
    assert "Effort: high" in template.render_chat(CHAT, kwargs={"effort": "high"})
    assert "Effort: low" in template.render([("user", "Hi")], generate=True)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinkng": False}, "has no variable 'enable_thinkng'"),
        ({"messages": []}, "'messages' is set by ragcache itself"),
        ({"add_generation_prompt": False}, "set by ragcache itself"),
        ({"effort": "low<|end|>"}, "holds a control token"),
        ({"effort": ["deep", {"a": "<|assistant|>"}]}, "holds a control token"),
        ({"effort": "\U00100000"}, "private character"),
    ],
)
def test_what_cannot_be_said_to_a_template_is_refused(
    rag: RagCache, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rag.chat(CHAT, chat_template_kwargs=kwargs)
    with pytest.raises(InvalidRequest, match=message):
        ask(rag, chat_template_kwargs=kwargs)


def test_a_folder_is_not_opened_with_an_unknown_variable(
    thinking: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="has no variable 'silence'"):
        RagCache.open(tmp_path / "state", thinking, chat_template_kwargs={"silence": 1})


def test_a_plain_text_has_no_template(rag: RagCache) -> None:
    with pytest.raises(InvalidRequest, match="a plain text has no chat template"):
        rag.chat("Where", chat_template_kwargs=QUIET)


def test_variables_behind_the_documents_read_the_same_states(rag: RagCache) -> None:
    before = ask(rag)
    quiet = ask(rag, chat_template_kwargs=QUIET)
    added = len(rag.internals.shared.model.encode("(no thoughts) "))
    assert quiet.reuse.cached_tokens == before.reuse.cached_tokens > 0
    assert quiet.reuse.prompt_tokens - before.reuse.prompt_tokens == added
    exact = ask(rag, chat_template_kwargs=QUIET, mode="exact")
    assert exact.reuse.prompt_tokens == quiet.reuse.prompt_tokens


def test_variables_before_the_documents_belong_to_the_key(rag: RagCache) -> None:
    encoder = rag.internals.ask.encoder
    low = encoder.with_template({"effort": "low"})
    assert encoder.with_template({}) is encoder
    assert encoder.with_template(QUIET).preamble_key == encoder.preamble_key
    assert low.preamble_key != encoder.preamble_key
    assert low.key([1, 2, 3]) != encoder.key([1, 2, 3])
    encoded = rag.stats().encoded
    first = ask(rag, chat_template_kwargs={"effort": "low"})
    assert rag.stats().encoded > encoded, "states behind another preamble are others"
    again = ask(rag, chat_template_kwargs={"effort": "low"})
    assert again.reuse.cached_tokens > first.reuse.cached_tokens
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_variables_of_the_folder_are_those_of_each_call(
    rag: RagCache, thinking: LoadedModel, tmp_path: Path
) -> None:
    notes = write_notes(tmp_path / "notes")
    with RagCache.open(
        tmp_path / "state", thinking, max_tokens=4, chat_template_kwargs={"effort": "low"}
    ) as low:
        low.ingest("notes", notes)
        expected = ask(rag, chat_template_kwargs={"effort": "low", **QUIET})
        found = ask(low, chat_template_kwargs=QUIET)
        assert found.choices[0].token_ids == expected.choices[0].token_ids
        assert found.reuse.prompt_tokens == expected.reuse.prompt_tokens
        assert found.reuse.cached_tokens > 0
        length = GenerationParams(max_tokens=1)
        chats = [
            low.chat(CHAT, generation=length),
            rag.chat(CHAT, generation=length, chat_template_kwargs={"effort": "low"}),
        ]
        assert chats[0].reuse.prompt_tokens == chats[1].reuse.prompt_tokens
