"""Loading a model, its fingerprint, the frame of its prompts, tokenizing in many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from ragcache import RagCache
from ragcache.errors import ConfigurationError, ModelNotFound, UnsupportedModel
from ragcache.models import LoadedModel, PromptFrame, load_model, loader, prompt_frame, wrap_causal
from ragcache.models.loader import INSTRUCTION, READER, READER_INSTRUCTION
from ragcache.models.model import model_fingerprint
from ragcache.models.tokenizer import tokenizer_fingerprint
from ragcache.modes import PRIMED, ROOTED, ReuseMode
from tests.tiny_models import tiny_model


def save(folder: Path, reader: LoadedModel, family: str = "llama", **changes: Any) -> Path:
    """A tiny random model with the reader's tokenizer, as `save_pretrained` writes them."""
    sizes = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 2048, **changes}
    tiny_model(family, **sizes).save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    return folder


def test_the_embedded_reader_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READER", READER)
    embedded = load_model()
    assert embedded.name == "ragcache-reader"
    assert embedded.causal.states_dtype == torch.bfloat16, "the checkpoint's own"
    assert load_model(READER).causal.fingerprint == embedded.causal.fingerprint
    assert embedded.default_mode == ROOTED, "it was trained on rooted modules"


@pytest.mark.parametrize(("family", "mode"), [("llama", PRIMED), ("gpt2", ROOTED)])
def test_other_models_read_primed_by_default(
    tmp_path: Path, reader: LoadedModel, family: str, mode: ReuseMode
) -> None:
    """Unless their states cannot move."""
    assert load_model(save(tmp_path, reader, family)).default_mode == mode


def test_what_cannot_be_read_is_named(tmp_path: Path, reader: LoadedModel) -> None:
    folder = save(tmp_path / "model", reader)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"not weights")
    with pytest.raises(ModelNotFound, match="cannot load the model"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ModelNotFound, match="cannot load the model"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"the folder has no config\.json"):
        load_model(folder)
    folder = tmp_path / "nowhere"
    with pytest.raises(ModelNotFound, match=r"config\.json, weights and tokenizer") as caught:
        load_model(folder)
    assert f"cannot load the model '{folder}'" in str(caught.value)


def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, reader: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise TimeoutError(f"no answer in {timeout} seconds")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.example:8443")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("ragcache.hub.getproxies", dict)
    with monkeypatch.context() as patch:
        patch.delattr(loader, "quiet_loading")  # transformers takes seconds to import
        with pytest.raises(ModelNotFound, match=r"'some/model': .* the model hub does not answer"):
            load_model("some/model")
    assert asked == [("hub.example", 8443)]
    cached = tmp_path / "models--some--model"
    save(cached / "snapshots" / "1", reader)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    assert load_model("some/model").name == "some/model"


@pytest.mark.slow
def test_a_saved_model_answers(
    tmp_path: Path, reader: LoadedModel, notes: Path, family: str
) -> None:
    folder = save(tmp_path / "model", reader, family)
    with RagCache.open(tmp_path / "state", folder, max_tokens=4) as rag:
        rag.ingest("notes", [notes])
        answers = {
            mode: rag.ask("Where is the spare key?", collection="notes", k=1, mode=mode)
            for mode in ("rooted", "exact")
        }
        assert rag.stats().model == str(folder)
    assert answers["rooted"].sources[0].document == "keys.md"
    assert answers["rooted"].reuse.cached_tokens > 0
    assert answers["rooted"].text == answers["exact"].text, "one module is an ordinary prefix"


def test_loading_leaves_the_verbosity_as_it_was(reader: LoadedModel) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        load_model()
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


def test_decoding_passes_over_control_tokens(reader: LoadedModel) -> None:
    ids = [*reader.encode("the red cupboard"), *reader.stop_ids]
    assert reader.decode(ids) == "the red cupboard"


def test_the_stop_tokens_are_those_of_model_and_tokenizer(reader: LoadedModel) -> None:
    def stops(config: Any, own: int | None) -> frozenset[int]:
        causal: Any = SimpleNamespace(model=SimpleNamespace(generation_config=config))
        return LoadedModel("fake", causal, SimpleNamespace(eos_token_id=own)).stop_ids

    def listing(ids: int | list[int] | None) -> Any:
        return SimpleNamespace(eos_token_id=ids)

    assert stops(listing(5), 5) == {5}
    assert stops(listing([5, 9]), 7) == {5, 7, 9}
    assert stops(listing(None), 7) == stops(None, 7) == {7}
    assert stops(listing(0), None) == {0}, "token 0 is a token"
    assert stops(listing(None), None) == frozenset()
    assert reader.stop_ids == {reader.tokenizer.convert_tokens_to_ids("<|end|>")}


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
REPEATS = "{% for m in messages %}{{ m['content'] }} again: {{ m['content'] }}{% endfor %}"
DROPS = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
)


DATED = (
    "{%- if not day is defined %}{%- set day = strftime_now('%d %b %Y') %}{%- endif %}"
    "Today Date: {{ day }}, year {{ strftime_now(\"%Y\")|int }}, 100%% {{ strftime_now('%%d') }}"
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
)


def tokenizer(template: str | None, *, bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "word": 2}, unk_token="word")),
        bos_token=bos,
        eos_token="</s>",
    )
    made.chat_template = template
    return made


def test_the_frame_of_the_embedded_reader(reader: LoadedModel) -> None:
    frame = prompt_frame(reader.tokenizer, reader.instruction)
    assert frame.preamble == f"<|user|>{READER_INSTRUCTION}\n\n"
    assert prompt_frame(reader.tokenizer).preamble == f"<|user|>{INSTRUCTION}\n\n"
    assert frame.question == "Question: "
    assert frame.epilogue == "<|assistant|>"


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, None], ids=["chatml", "llama-2", "none"])
@pytest.mark.parametrize("bos", ["<s>", None])
def test_the_parts_make_the_prompt_that_the_template_makes(
    template: str | None, bos: str | None
) -> None:
    with_template = tokenizer(template, bos=bos)
    if template == LLAMA_2 and bos is None:
        pytest.skip("the template writes one")
    frame = prompt_frame(with_template, "Read.")
    inside = "Read.\n\nmodules\n\nQuestion: why?"
    expected = f"{bos or ''}{inside}\nAnswer:"
    if template is not None:
        expected = with_template.apply_chat_template(
            [{"role": "user", "content": inside}], tokenize=False, add_generation_prompt=True
        )
    assert f"{frame.preamble}modules\n\n{frame.question}why?{frame.epilogue}" == expected


@pytest.mark.parametrize("template", [REPEATS, DROPS], ids=["repeats", "drops"])
def test_a_template_that_repeats_or_drops_the_text_is_refused(template: str) -> None:
    with pytest.raises(UnsupportedModel, match="does not repeat the user's text exactly once"):
        prompt_frame(tokenizer(template))


TEXT = "<|end|> The key hangs <|user|> in the cupboard. " * 20


def test_threads_tokenize_as_one_does(reader: LoadedModel) -> None:
    ours, theirs = reader.encode(TEXT), reader.encode_untrusted(TEXT)
    assert ours != theirs

    def tokenize(number: int) -> bool:
        if number % 2:
            return reader.encode(TEXT) == ours
        return reader.encode_untrusted(TEXT) == theirs

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(tokenize, range(900)))


@pytest.mark.parametrize("where", [0, 1, 12_345, "layers", "places"])
def test_changed_weights_or_layers_change_the_fingerprint(where: int | str) -> None:
    """Also one whose numbers change places, so that their sum is the same."""
    model = tiny_model("llama")
    before = model_fingerprint(model)
    weight, layers = model.model.embed_tokens.weight, model.model.layers
    if isinstance(where, int):
        with torch.no_grad():
            weight.view(-1)[where] += 1e-3
    elif where == "places":
        with torch.no_grad():
            flat = weight.view(-1)
            flat[[12_345, 12_347]] = flat[[12_347, 12_345]]
    else:
        layers[0], layers[1] = layers[1], layers[0]
    assert model_fingerprint(model) != before


def test_another_dtype_changes_the_fingerprint() -> None:
    digests = {
        model_fingerprint(tiny_model("llama", dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"max_position_embeddings": 1024},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_changes_the_fingerprint(change: dict[str, Any]) -> None:
    plain, changed = tiny_model("llama"), tiny_model("llama", **change)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, changed.state_dict()[name])
    assert model_fingerprint(plain) != model_fingerprint(changed)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_saving_and_loading_changes_no_fingerprint(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = tiny_model(family, dtype)
    before = model_fingerprint(model)
    assert model_fingerprint(tiny_model(family, dtype)) == before
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model_fingerprint(loaded) == before
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert wrap_causal(again).fingerprint == before


def test_a_tokenizer_keeps_its_fingerprint_in_use(tmp_path: Path, reader: LoadedModel) -> None:
    reader.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == reader.tokenizer_fingerprint
    loaded.encode("<|end|>", split_special_tokens=True)
    assert tokenizer_fingerprint(loaded) == reader.tokenizer_fingerprint
    loaded(["one", "two and three"], padding=True, truncation=True, max_length=8)
    assert tokenizer_fingerprint(loaded) == reader.tokenizer_fingerprint
    loaded.add_tokens(["quayside"])
    assert tokenizer_fingerprint(loaded) != reader.tokenizer_fingerprint


def test_without_a_serialized_form_tokens_count_with_their_ids() -> None:
    """Slow tokenizers tell their vocabulary only."""

    def slow(vocabulary: dict[str, int]) -> str:
        return tokenizer_fingerprint(SimpleNamespace(get_vocab=lambda: vocabulary))

    assert slow({"a": 0, "b": 1}) == slow({"b": 1, "a": 0})
    assert slow({"a": 0, "b": 1}) != slow({"a": 1, "b": 0})


@pytest.mark.parametrize("device", ["gpu", "cuda:97"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match=device):
        load_model(device=device)


def test_the_date_in_a_frame_does_not_change_with_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Later:
            return cls(2031, 1, 5, tzinfo=tz)

    dated = tokenizer(DATED)
    expected = PromptFrame(
        "Today Date: 26 Jul 2024, year 2024, 100%% %d<s>user: Read.\n\n", "Question: ", "</s>", True
    )
    assert prompt_frame(dated, "Read.") == expected
    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    live = dated.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert "05 Jan 2031" in live, "the template prints today's date"
    assert prompt_frame(dated, "Read.") == expected
    assert not prompt_frame(tokenizer(CHATML), "Read.").dated
