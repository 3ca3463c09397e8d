"""Tokens, texts and chats without transformers, beside transformers over the same files."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer

from ragcache.models import load_model, prompt_frame, render_undated
from ragcache.models.plain_tokenizer import PlainTokenizer, render_chat, renders
from ragcache.models.reader import READER
from ragcache.models.tokenizer import PromptTokenizer, control_tokens, tokenizer_fingerprint
from tests.ragcache.models.test_tokenizer import merging, spaced, unigram
from tests.tiny_models import tiny_model

WORDS = ["▁", "k", "e", "y", "ke", "key", "▁key", *(f"<0x{byte:02X}>" for byte in range(256))]


def llama() -> Any:
    """Llama 2's kind: a space before texts, and bytes for letters that are no token."""
    pieces = ["<unk>", "<s>", "</s>", *WORDS]
    merges = [("k", "e"), ("ke", "y"), ("▁", "key")]
    return LlamaTokenizer(vocab={each: n for n, each in enumerate(pieces)}, merges=merges)


def qwen2() -> Any:
    """Qwen 2's kind: bytes, digits one by one, and control tokens beside the vocabulary."""
    backend = PlainTokenizer(READER).backend_tokenizer
    letters = {token: n for token, n in backend.get_vocab().items() if len(token) == 1}
    vocabulary = {token: n for n, token in enumerate(sorted(letters))}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    made.add_special_tokens({"eos_token": "<|im_end|>"})
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


MADE: dict[str, Callable[[], Any]] = {
    "llama": llama, "qwen2": qwen2, "merging": merging, "unigram": unigram,
    "spaces before the first": lambda: spaced("first"),
    "spaces after tokens": lambda: spaced("always"),
    "reader": lambda: AutoTokenizer.from_pretrained(READER),
}  # fmt: skip


@pytest.fixture(scope="module", params=MADE)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of an opened checkpoint, and transformers' own."""
    folder, made = tmp_path_factory.mktemp("model"), MADE[request.param]()
    made.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    tiny_model("llama", vocab_size=max(len(made), 64)).save_pretrained(folder)
    made.save_pretrained(folder)
    return load_model(folder).tokenizer, AutoTokenizer.from_pretrained(folder)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_and_texts_are_those_of_transformers(both: Any, text: str) -> None:
    ours, theirs = both
    assert isinstance(ours, PlainTokenizer)
    for special in (True, False):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_prompts_are_those_of_transformers(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both
    expected = PromptTokenizer(theirs)
    monkeypatch.setattr("ragcache.models.tokenizer.renamed_spec", None)  # it was kept
    one, other = PromptTokenizer(ours), PromptTokenizer(ours)
    control = "".join(expected.control)
    for text in (control, "The key. <s>[INST] 日本", " a", "\n\n  b<think>", ""):
        for first in (True, False):
            assert one.encode(text, first=first) == expected.encode(text, first=first)
        spelled = [each.encode(each.spell(text)) for each in (one, expected)]
        assert spelled[0] == spelled[1]
    assert one.spell(control) != other.spell(control), "a secret serves once"
    assert other.encode(one.spell(control)) != one.encode(one.spell(control))


def test_control_tokens_are_those_of_transformers(both: Any) -> None:
    ours, theirs = both
    for text in ("", "<s>a</s><think>|word|  b", "<tool_call><|im_end|>\n", "<|end|><|pad|>"):
        assert ours.encode(text) == theirs.encode(text)
    for role in ("bos", "eos", "unk", "pad"):
        for name in (f"{role}_token", f"{role}_token_id"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert str(ours.added_tokens_decoder) == str(theirs.added_tokens_decoder)
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert control_tokens(ours) == control_tokens(theirs)
    assert PromptTokenizer(ours).prefixes == PromptTokenizer(theirs).prefixes
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(theirs)
    assert prompt_frame(ours) == prompt_frame(theirs)


def test_what_it_does_not_know_is_done_by_transformers(both: Any) -> None:
    ours, theirs = both
    assert ours.convert_ids_to_tokens([3, 5]) == theirs.convert_ids_to_tokens([3, 5])
    assert ours.encode("a key", truncation=True, max_length=1) == theirs.encode(
        "a key", truncation=True, max_length=1
    )
    assert type(deepcopy(ours)) is type(theirs)
    chat = [{"role": "user", "content": "a"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    with pytest.raises(AttributeError, match="add_tokens"):
        ours.add_tokens(["<|tool|>"])


TEMPLATES = {
    "tools": """{%- if tools %}
        {{- '<s>system\\n# Tools' }}
        {%- for tool in tools %}
            {{- "\\n" }}
            {{- tool | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
    {%- for message in messages %}
        {%- if message.role == 'assistant' and message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '<tool_call>' + (call.function | tojson(indent=2)) + '</tool_call>' }}
            {%- endfor %}
        {%- else %}
            {{- '<s>' + message.role + '\\n' + message.content + '</s>\\n' }}
        {%- endif %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}""",
    "loops": """{% set ns = namespace(turns=0, system=false) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% set ns.system = true %}{% continue %}{% endif %}
    {% set ns.turns = ns.turns + 1 %}
{{ loop.index0 }}: {{ message['content'] | trim }}
    {% if ns.turns > 2 %}{% break %}{% endif %}
{% endfor %}
{{ ns.turns }} {{ ns.system }} {{ bos_token }} {{ dict(a=1) }} {{ enable_thinking }}""",
    "reasoning": """{% for m in messages %}{{ m.role }}:{% if m.reasoning_content is defined %}
<think>{{ m.reasoning_content }}|{{ m.thinking }}</think>
{% endif %}{{ m.content if m.content is string else (m.content | tojson) }}{% endfor %}
{{ messages[0] | tojson(sort_keys=true, separators=(',', ':')) }} {{ '\\u00e9<b>' | tojson }}
{{ messages[-1].tool_calls is defined }} {{ documents is none }} {{ tools is none }}""",
    "macros": """{% macro turn(m, last=false) -%}
[{{ m.role | upper }}] {{ m.content }}{{ eos_token if not last }}
{%- endmacro %}
{% for m in messages %}{{ turn(m, loop.last) }}{% endfor %}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('; ') }}""",
    "dates": "{{ strftime_now('%Y') }} {{ today | default('none') }}{{ messages[0].content }}",
}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "<key> é", "n": 2}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Where is the <b>key</b>?\n"}],
    [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "日本語?"},
        {"role": "assistant", "content": "Under the mat.", "reasoning": "I look.\n"},
        {"role": "user", "content": "Really?", "name": None},
        {"role": "assistant", "content": "Yes", "thinking": "Hm", "reasoning_content": "No"},
        {"role": "user", "content": "{{ messages }}"},
    ],
    [
        {"role": "user", "content": "Find it"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "In the \"shed\" — 'there'", "tool_call_id": "1"},
    ],
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds <things> of Zoë's",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}


@cache
def reader_tokenizers() -> tuple[PlainTokenizer, Any]:
    return PlainTokenizer(READER), AutoTokenizer.from_pretrained(READER)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_those_of_transformers(name: str) -> None:
    ours, theirs = reader_tokenizers()
    for chat in CHATS:
        for tools in (None, [SCHEMA], [SCHEMA, SCHEMA]):
            for generate in (True, False):
                options = {"add_generation_prompt": generate, "enable_thinking": False}
                got, expected = (
                    each.apply_chat_template(
                        chat,
                        chat_template=TEMPLATES[name],
                        tools=tools,
                        tokenize=False,
                        **options,
                    )
                    for each in (ours, theirs)
                )
                assert got == expected


def test_dates_are_fixed_as_for_transformers() -> None:
    template = "{{ strftime_now('%d %b %Y, 100%%') }} {{ messages[0].content }}"
    texts = []
    for each in reader_tokenizers():
        each.chat_template = template
        texts.append(render_undated(each, CHATS[0], generate=True, day=datetime(2025, 3, 4)))
    reader_tokenizers.cache_clear()
    assert texts[0] == texts[1]
    assert texts[0].startswith("04 Mar 2025, 100% ")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.more }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 3 %}",
        "{{ namespace(__class__=3) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(3) }}",
        "{% for m in messages %}",
    ],
)
def test_templates_fail_as_those_of_transformers(template: str) -> None:
    for each in reader_tokenizers():
        with pytest.raises(TemplateError):
            each.apply_chat_template(CHATS[0], chat_template=template, tokenize=False)


def test_a_chat_without_messages_is_refused() -> None:
    for each in reader_tokenizers():
        with pytest.raises(ValueError, match=r"empty conversation|at least one message"):
            each.apply_chat_template([], tokenize=False)
    with pytest.raises(ValueError, match="at least one message"):
        render_chat("a", [])


def test_tags_of_other_renderers_are_known_before() -> None:
    assert renders(TEMPLATES["loops"])
    assert not renders("{% generation %}{% endgeneration %}")


def test_a_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    tokenizer = llama()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    opened = load_model(tmp_path).tokenizer
    assert isinstance(opened, PlainTokenizer)
    assert opened.chat_template is None
    with pytest.raises(ValueError, match="no chat template"):
        opened.get_chat_template()
    assert prompt_frame(opened) == prompt_frame(AutoTokenizer.from_pretrained(tmp_path))
