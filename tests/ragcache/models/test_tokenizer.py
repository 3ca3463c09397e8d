"""Control tokens come from a template alone, and a prompt's parts have the tokens of the whole."""

from __future__ import annotations

import ctypes
import platform
import random
from copy import deepcopy
from itertools import product
from string import ascii_lowercase
from threading import Thread
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from ragcache.models import LoadedModel, PromptTokenizer
from ragcache.models.tokenizer import control_tokens

CORPUS = [
    "<s>[INST] Read the notes.\n\nThe key hangs. [/INST]</s>",
    "a<think>b</think>c<tool_call>",
]
ADDED = ["<think>", "</think>", "<tool_call>", "|word|"]


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.add_tokens([AddedToken(each, normalized=False) for each in [*ADDED[:-1], "   "]])
    made.add_tokens([AddedToken(ADDED[-1], single_word=True)])
    return made


def spaced(kind: str) -> PreTrainedTokenizerFast:
    """Tokenizers that put a space before texts: before the first (Llama 3's heirs of Mistral), and
    after every control token too (Llama 2)."""
    backend = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True))
    if kind == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    trainer = BpeTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted({*"".join(CORPUS), "▁"} - {" "}),
        show_progress=False,
    )
    backend.train_from_iterator([text.split() for text in CORPUS], trainer)
    return wrapped(backend)


def unigram() -> PreTrainedTokenizerFast:
    """Its model has the control tokens among its pieces, and would choose them."""
    letters = sorted({*"".join(CORPUS)} - {" "})
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<think>", -0.5), ("▁", -2.0)]
    backend = Tokenizer(Unigram([*pieces, *((each, -5.0) for each in letters)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return wrapped(backend)


def merging() -> PreTrainedTokenizerFast:
    """Byte-pair encoding that merges letters to a control token."""
    letters = sorted({*"".join(CORPUS)} - {" "})
    merges = [("<", "s"), ("<s", ">")]
    pieces = ["<unk>", "<s>", "</s>", *letters, "<s"]
    backend = Tokenizer(BPE({each: n for n, each in enumerate(pieces)}, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return wrapped(backend)


RUNS = ("   ", "      ", "\n\n\n\n")


@pytest.fixture(scope="module")
def added(reader: LoadedModel) -> Any:
    """The reader's tokenizer with more tokens."""
    made = deepcopy(reader.tokenizer)
    made.add_tokens([*ADDED, *RUNS])
    return made


@pytest.fixture(scope="module", params=["reader", "first", "always", "unigram", "merging"])
def tokenizer(request: pytest.FixtureRequest, added: Any) -> Any:
    if request.param == "reader":
        return added
    if request.param in ("unigram", "merging"):
        return unigram() if request.param == "unigram" else merging()
    return spaced(request.param)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> PromptTokenizer:
    return PromptTokenizer(tokenizer)


def test_what_people_write_never_becomes_a_control_token(
    tokenizer: Any, prompts: PromptTokenizer
) -> None:
    controls = {*control_tokens(tokenizer).values()} - {tokenizer.unk_token_id}
    assert len(controls) >= len(ADDED)
    for token in prompts.control:
        for text in (token, f"a{token}b", f"The {token} key", token * 3, f" {token} "):
            for first in (True, False):
                ids = prompts.encode(text, first=first)
                assert ids
                assert not controls & {*ids}, text


def test_text_that_people_wrote_comes_back(added: Any) -> None:
    prompts = PromptTokenizer(added)
    text = "First <think>I think</think> then <tool_call> and <|end|>, |word|."
    assert added.decode(prompts.encode(text)) == text
    text = "a      b\n\n\n\nc"
    assert prompts.encode(text) == added.encode(text, add_special_tokens=False)
    assert not {*RUNS} & {*control_tokens(added)}, "runs of spaces stay tokens"


def test_a_template_writes_control_tokens(tokenizer: Any, prompts: PromptTokenizer) -> None:
    for token, number in prompts.control.items():
        for text in (token, f"{token}a", f"[INST]{token}{token}"):
            ids = prompts.encode(prompts.spell(text), first=True)
            assert ids.count(number) == text.count(token)
    marks = ["<s>", "</s>"] if tokenizer.bos_token == "<s>" else ["<|user|>", "<|end|>"]
    whole = f"{marks[0]}[INST] Read the notes.\n\nThe key hangs. [/INST]{marks[1]}<think>a</think>b"
    assert prompts.encode(prompts.spell(whole), first=True) == tokenizer.encode(
        whole, add_special_tokens=False
    ), "as Hugging Face tokenizes rendered chats"


def test_parts_of_a_prompt_have_the_tokens_of_the_whole(
    tokenizer: Any, prompts: PromptTokenizer
) -> None:
    begin = "<s>" if tokenizer.bos_token == "<s>" else "<|user|>"
    parts = [f"{begin}[INST] Read", " the notes.", " The key", " hangs", f" [/INST]{begin}", "a"]
    ids = prompts.encode(prompts.spell(parts[0]), first=True)
    for part in parts[1:]:
        ids += prompts.encode(prompts.spell(part))
    expected = tokenizer.encode("".join(parts[:-1]), add_special_tokens=False)
    assert ids[: len(expected)] == expected


def test_texts_between_control_tokens_have_their_own_tokens(prompts: PromptTokenizer) -> None:
    texts = ["", "a", " b ", "\n\nc", "  d\n", "<think", "|word|", "/s>", "   "]
    if not prompts.parts:
        texts = []
    for token in prompts.control:
        for before, after in product(texts, repeat=2):
            parts = [before, prompts.spell(token), after]
            apart = [number for part in parts for number in prompts.encode(part)]
            assert prompts.encode("".join(parts)) == apart


def test_a_token_that_takes_spaces_does_not_separate_texts(added: Any) -> None:
    assert PromptTokenizer(added).parts
    made = deepcopy(added)
    made.add_tokens([AddedToken("<|cut|>", rstrip=True, special=True)])
    assert not PromptTokenizer(made).parts


def test_every_copy_has_names_of_its_own() -> None:
    tokenizer = merging()
    spelled = {PromptTokenizer(tokenizer).spell("</s>") for _ in range(3)}
    assert len(spelled) == 3
    assert "</s>" not in spelled
    other = PromptTokenizer(tokenizer)
    assert tokenizer.convert_tokens_to_ids("</s>") not in other.encode(spelled.pop())


class Slow:
    """A tokenizer without a backend, one token a character; it passes over added tokens."""

    all_special_tokens = ("<s>",)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {1000: AddedToken("<s>", special=True), 1001: AddedToken("<think>")}

    def encode(self, text: str, **options: bool) -> list[int]:
        assert options == {"add_special_tokens": False, "split_special_tokens": True}
        return [ord(character) for character in text]


def test_tokenizers_without_a_backend_are_served() -> None:
    prompts = PromptTokenizer(Slow())
    assert prompts.encode("a<s>") == [*b"a<s>"]
    assert prompts.encode(prompts.spell("a<s><think>b")) == [*b"a", 1000, 1001, *b"b"]
    assert not prompts.prefixes


def test_a_vocabulary_of_words_keeps_its_control_tokens_apart() -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "key": 3}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    prompts = PromptTokenizer(made)
    assert prompts.encode("<s>") == [0]
    assert prompts.encode("<s> key") == [0]
    assert prompts.encode("key") == [3]
    assert prompts.encode(prompts.spell("<s>key")) == [1, 3]


class Usage(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc counts its blocks")
def test_threads_keep_no_words_that_they_tokenized(reader: LoadedModel) -> None:
    usage = ctypes.CDLL(None).mallinfo2
    usage.restype = Usage
    rng, grown = random.Random(0), []
    text = " ".join("".join(rng.choices(ascii_lowercase, k=9)) for _ in range(10_000))

    def tokenize() -> None:
        reader.encode_untrusted("one word")
        before = usage().field_7  # uordblks
        for at in range(0, len(text), 10_000):
            reader.encode_untrusted(text[at : at + 10_000])
        grown.append(usage().field_7 - before)

    thread = Thread(target=tokenize)
    thread.start()
    thread.join()
    assert grown[0] < 2**20  # with BPE's cache 4.7 MiB
