"""The embedded reader without transformers, beside transformers over the same files."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache.attention import AttentionMetadata, CausalBlock, ContiguousWrite
from ragcache.models import CausalLM, Rotary, prompt_frame, wrap_causal
from ragcache.models.fingerprint import tokenizer_fingerprint
from ragcache.models.model import ForwardBatch
from ragcache.models.reader import READER, ReaderLM, read_reader
from ragcache.models.tokenizer import PromptTokenizer

CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Where is the <b>key</b>?\n"},
    {"role": "assistant", "content": "Under the mat."},
    {"role": "user", "content": "日本語?"},
]


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    return AutoTokenizer.from_pretrained(READER)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_reader(READER)[1]


def logits(causal: CausalLM, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, vocabulary], of a text without segments."""
    rows = torch.arange(len(token_ids))
    metadata = AttentionMetadata(
        shared_queries=None,
        shared_kv=(),
        causal_blocks=(CausalBlock(0, len(rows)),),
        paged_queries=None,
        writes=(ContiguousWrite(*causal.new_states(len(rows)), 0, 0, len(rows)),),
        shared_index=rows[None],
    )
    return causal.forward(ForwardBatch(token_ids, positions, rows, metadata))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    patched = wrap_causal(AutoModelForCausalLM.from_pretrained(READER, dtype=dtype))
    causal = ReaderLM(read_reader(READER)[0].to(dtype))
    assert causal.dtype == dtype
    assert isinstance(patched.scheme, Rotary)
    assert isinstance(causal.scheme, Rotary)
    assert torch.equal(causal.scheme.inverse_frequency, patched.scheme.inverse_frequency)
    assert causal.scheme.name == patched.scheme.name
    token_ids = torch.randint(8, 8192, (48,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(48) + torch.arange(48) // 7 * 100  # with gaps, as prompts of PML
    assert torch.equal(logits(causal, token_ids, positions), logits(patched, token_ids, positions))


def test_its_sizes_are_those_of_the_checkpoint() -> None:
    causal = ReaderLM(read_reader(READER)[0])
    assert (causal.num_layers, causal.num_heads, causal.num_kv_heads) == (8, 6, 2)
    assert (causal.head_dim, causal.window, causal.vocabulary) == (64, 4096, 8192)
    assert (causal.scheme.name, causal.dtype) == ("rotary:default:32", torch.bfloat16)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_and_texts_are_those_of_transformers(
    tokenizer: Any, hugging_face: Any, text: str
) -> None:
    ids = hugging_face.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == hugging_face.decode(ids)


def test_special_tokens_are_those_of_transformers(tokenizer: Any, hugging_face: Any) -> None:
    ids = [0, 17, 1, 300, 2, 3]
    for skip in (True, False):
        expected = hugging_face.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token"):
        assert getattr(tokenizer, name) == getattr(hugging_face, name), name
    assert set(tokenizer.all_special_tokens) == set(hugging_face.all_special_tokens)
    assert (len(tokenizer), tokenizer.get_vocab()) == (len(hugging_face), hugging_face.get_vocab())
    assert PromptTokenizer(tokenizer).control == PromptTokenizer(hugging_face).control
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(hugging_face)


@pytest.mark.parametrize("generate", [True, False])
def test_chats_are_those_of_transformers(tokenizer: Any, hugging_face: Any, generate: bool) -> None:
    assert prompt_frame(tokenizer) == prompt_frame(hugging_face)
    for tokenize in (True, False):
        expected, got = (
            each.apply_chat_template(
                CHAT, tools=None, tokenize=tokenize, add_generation_prompt=generate
            )
            for each in (hugging_face, tokenizer)
        )
        assert got == expected
    other = "{{ messages[0].content }}|{% if false %}{% endif %}"
    rendered = tokenizer.apply_chat_template(CHAT, chat_template=other, tokenize=False)
    assert rendered == "Be brief. |"


def test_what_it_does_not_know_is_done_by_transformers(tokenizer: Any, hugging_face: Any) -> None:
    assert tokenizer.convert_ids_to_tokens([17, 300]) == hugging_face.convert_ids_to_tokens(
        [17, 300]
    )
    assert tokenizer.encode("a key", truncation=True, max_length=1) == hugging_face.encode("a")
    assert type(deepcopy(tokenizer)) is type(hugging_face)
    with pytest.raises(AttributeError, match="add_tokens"):
        tokenizer.add_tokens(["<|tool|>"])


@pytest.mark.slow
def test_a_question_needs_no_transformers() -> None:
    code = (
        "import sys, tempfile\n"
        "from ragcache import RagCache, SourceDocument\n"
        "with tempfile.TemporaryDirectory() as state, RagCache.open(state) as rag:\n"
        "    rag.ingest('notes', [SourceDocument('a.md', 'The key hangs in the shed.')])\n"
        "    print(rag.ask('Where is the key?', collection='notes').text)\n"
        "slow = ('transformers', 'torch._dynamo', 'faiss', 'requests')\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
