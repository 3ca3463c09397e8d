"""The frame of a prompt: the model's own chat template around modules and question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragcache.errors import UnsupportedModel

INSTRUCTION = (
    "Answer the question from the documents below. "
    "Be brief: give only the answer, in the words of the documents."
)
_MARK = "\u2063ragcache\u2063"  # stands for the inside of the user turn; no text contains it


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """Texts around the modules of a prompt.

    preamble: everything up to the first module (template, then instruction); question: goes
    before the question's text; epilogue: the rest of the template, up to where the answer starts.
    """

    preamble: str
    question: str
    epilogue: str


def prompt_frame(tokenizer: Any, instruction: str = INSTRUCTION) -> PromptFrame:
    """Splits the tokenizer's chat template at the inside of the user turn."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": _MARK}]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    else:
        bos = tokenizer.bos_token or ""
        rendered = f"{bos}{_MARK}\nAnswer:"
    if rendered.count(_MARK) != 1:
        raise UnsupportedModel(
            "this model's chat template does not repeat the user's text exactly once, so modules "
            "cannot be placed inside the user turn"
        )
    before, _, after = rendered.partition(_MARK)
    return PromptFrame(f"{before}{instruction}\n\n", "Question: ", after)
