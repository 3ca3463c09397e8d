"""The frame of a prompt under the chat templates that are about."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ragcache.errors import UnsupportedModel
from ragcache.models import LoadedModel, prompt_frame
from ragcache.models.prompting import INSTRUCTION

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


def tokenizer(template: str | None, *, bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "word": 2}, unk_token="word")),
        bos_token=bos,
        eos_token="</s>",
    )
    made.chat_template = template
    return made


def test_the_frame_of_the_embedded_reader(reader: LoadedModel) -> None:
    frame = prompt_frame(reader.tokenizer)
    assert frame.preamble == f"<|user|>{INSTRUCTION}\n\n"
    assert frame.question == "Question: "
    assert frame.epilogue == "<|assistant|>"


def test_the_frame_of_a_chatml_template_keeps_its_system_turn() -> None:
    frame = prompt_frame(tokenizer(CHATML), "Read.")
    assert frame.preamble == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nRead.\n\n"
    )
    assert frame.epilogue == "<|im_end|>\n<|im_start|>assistant\n"


def test_the_frame_of_a_llama_2_template_starts_with_its_first_token() -> None:
    frame = prompt_frame(tokenizer(LLAMA_2), "Read.")
    assert (frame.preamble, frame.epilogue) == ("<s>[INST] Read.\n\n", " [/INST]")


def test_a_base_model_without_a_template_gets_a_plain_frame() -> None:
    frame = prompt_frame(tokenizer(None), "Read.")
    assert (frame.preamble, frame.epilogue) == ("<s>Read.\n\n", "\nAnswer:")
    assert prompt_frame(tokenizer(None, bos=None), "Read.").preamble == "Read.\n\n"


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, None], ids=["chatml", "llama-2", "none"])
def test_the_parts_make_the_prompt_that_the_template_makes(template: str | None) -> None:
    with_template = tokenizer(template)
    frame = prompt_frame(with_template, "Read.")
    inside = "Read.\n\nmodules\n\nQuestion: why?"
    if template is None:
        expected = f"<s>{inside}\nAnswer:"
    else:
        expected = with_template.apply_chat_template(
            [{"role": "user", "content": inside}], tokenize=False, add_generation_prompt=True
        )
    joined = f"{frame.preamble}modules\n\n{frame.question}why?{frame.epilogue}"
    assert joined == expected


@pytest.mark.parametrize("template", [REPEATS, DROPS], ids=["repeats", "drops"])
def test_a_template_that_repeats_or_drops_the_text_is_refused(template: str) -> None:
    with pytest.raises(UnsupportedModel, match="does not repeat the user's text exactly once"):
        prompt_frame(tokenizer(template))
