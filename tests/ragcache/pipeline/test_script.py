"""The tokens of a prompt that is put together of modules and new text decode to the prompt."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache.models import LoadedModel
from ragcache.pipeline import ChatText, TemplateText
from ragcache.pipeline.inside import InsideText
from ragcache.pipeline.script import LEAST, Script, write_script
from ragcache.recognition import Fingerprints, FingerprintTable, find
from ragcache.store import ModuleRow
from tests.ragcache.pipeline.sentencepiece import spaced_tokenizer

MODULES = [
    "The survey boat Pipit is moored at the north quay, where the key hangs.\n\n",
    "Everybody has 26 days of leave a year. Requests go to Ines Marlow.\n\n",
    "  which boat is at the quay? Read the documents and answer.</s>\n\n",
]
ROWS = [ModuleRow(n, f"d#{n}", "d", "", text) for n, text in enumerate(MODULES)]
TABLE = FingerprintTable(Fingerprints.of(ROWS))


@pytest.fixture(scope="module", params=["reader", "spaced"])
def model(request: pytest.FixtureRequest, reader: LoadedModel) -> LoadedModel:
    if request.param == "reader":
        return reader
    return LoadedModel("spaced", reader.causal, spaced_tokenizer())


def written(
    model: LoadedModel, text: str, linked: int = 0, allowed: bool = True, lead: tuple[int, ...] = ()
) -> tuple[Script, list[int]]:
    """A prompt's script, and all of its tokens in order."""
    found = find(text, TABLE)
    ids = [tuple(model.encode_untrusted(each.module.text)) for each in found]
    inside = InsideText(model, TemplateText(model))
    script = write_script(
        text, found, ids, inside, linked=linked, lead=lead, may_stand=lambda *_: allowed
    )
    places = dict(script.own)
    assert len(places) == len(script.own)
    assert [at for at, _ in script.own] == sorted(places)
    for reading in script.readings:
        run = reading.token_ids[reading.begin : reading.end]
        at = range(reading.start, reading.start + reading.length)
        assert not places.keys() & set(at)
        places.update(zip(at, run, strict=True))
    assert sorted(places) == list(range(script.length))
    return script, [places[at] for at in range(script.length)]


def decoded(model: LoadedModel, ids: list[int]) -> str:
    text: str = model.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


PARTS = st.one_of(
    st.sampled_from([*MODULES, *map(str.strip, MODULES)]),
    st.sampled_from(["The key ", "boat", "\n", "\n\n", " ", "year. ", "Question: ", "<s>"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARTS, min_size=1, max_size=7), st.sampled_from([0, 3, 99]))
def test_the_tokens_decode_to_the_prompt(model: LoadedModel, parts: list[str], linked: int) -> None:
    content = "".join(parts)
    chat = ChatText(model, TemplateText(model))
    if content.strip():
        text = chat.render([{"role": "user", "content": content}], None)
        _, ids = written(model, text, linked)
        rendered = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        assert decoded(model, ids) == rendered
    _, ids = written(model, chat.plain(content), linked)
    whole = model.encode_untrusted(content)  # which may not decode to spaces at its front
    assert decoded(model, ids) == decoded(model, whole)


def test_modules_as_they_are_cost_no_tokens_of_their_own(reader: LoadedModel) -> None:
    script, _ = written(reader, f"Read: {MODULES[0]}{MODULES[1]}Which?")
    assert [(r.begin, r.end) for r in script.read] == [(0, len(r.token_ids)) for r in script.read]
    assert len(script.own) == len(reader.encode("Read: ")) + len(reader.encode("Which?"))


def test_a_trimmed_module_is_read_as_far_as_its_tokens_agree(model: LoadedModel) -> None:
    script, ids = written(model, f"[user] {MODULES[0].strip()}\r\nWhich?")
    [reading] = script.read
    assert len(reading.token_ids) - 6 < reading.length < len(reading.token_ids)
    own = model.encode_untrusted(MODULES[0])
    at = slice(reading.start, reading.start + reading.length)
    assert ids[at] == own[reading.begin : reading.end]


def test_a_space_that_the_tokenizer_adds_is_not_read(reader: LoadedModel) -> None:
    model = LoadedModel("spaced", reader.causal, spaced_tokenizer())
    script, _ = written(model, f"The key:\n{MODULES[0]}Which?")
    [reading] = script.read
    assert 0 < reading.begin <= 2
    assert reading.end == len(reading.token_ids)
    first, _ = written(model, f"{MODULES[0]}Which?")
    assert first.read[0].begin == 0, "a prompt may begin with it"


def test_the_last_token_is_computed(reader: LoadedModel) -> None:
    script, ids = written(reader, MODULES[0])
    [reading] = script.read
    assert script.own == [(script.length - 1, reading.token_ids[-1])]
    assert reading.length == len(ids) - 1


def test_modules_that_may_not_stand_there_are_computed(reader: LoadedModel) -> None:
    text = f"Read: {MODULES[0]}Which?"
    script, ids = written(reader, text, allowed=False)
    assert (script.read, len(script.readings)) == ([], 1)
    assert [token for _, token in script.own] == ids
    script, _ = written(reader, text, linked=99)
    assert script.read == []
    some, _ = written(reader, text, linked=LEAST)
    assert some.read[0].begin == LEAST


def test_what_stands_before_every_text_comes_first(reader: LoadedModel) -> None:
    script, ids = written(reader, MODULES[0], lead=(7,))
    assert ids[0] == 7
    assert script.read[0].start == 1
