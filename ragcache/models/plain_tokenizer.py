"""Tokenizers and chat templates by `tokenizers` and jinja2, without transformers.

A `PlainTokenizer` reads what transformers' tokenizer of a checkpoint has written
(`ragcache.models.plain_checkpoint`), and gives the same tokens and texts. `render_chat` sees a
conversation as transformers' templates do. `tests/ragcache/models/test_plain_tokenizer.py` compares
both with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens, which templates know, too."""
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
RENAMED = "renamed_tokenizer.json"
"""The tokenizer with other names for control tokens (`ragcache.models.tokenizer`)."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, or the second."""


class PlainTokenizer:
    """A tokenizer under the names of transformers, read only.

    Other methods are delegated to the tokenizer of transformers over the same checkpoint, which is
    imported at first use. A copy is a tokenizer of transformers.

    Args:
        folder: Folder of `tokenizer.json`, `tokenizer_config.json` (special tokens by `ROLES`, all
            of them as `all_special_tokens`, the `fingerprint`, and the `secret` in
            `renamed_tokenizer.json`; all but the first are optional) and `chat_template.jinja`, if
            there is a template.
        checkpoint: Folder of the checkpoint, for transformers. Defaults to the same.
    """

    bos_token: str | None
    eos_token: str | None

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        self._folder, self._checkpoint = folder, checkpoint or folder
        entries = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        template = folder / TEMPLATE
        self.chat_template = template.read_text(encoding="utf-8") if template.exists() else None
        self.backend_tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self.special_tokens_map = {name: entries[name] for name in ROLES if entries.get(name)}
        named = list(dict.fromkeys(self.special_tokens_map.values()))
        self.all_special_tokens = entries.get("all_special_tokens", named)
        self.kept_fingerprint: str | None = entries.get("fingerprint")
        self._secret: str | None = entries.get("secret")
        for name in ROLES:
            token = self.special_tokens_map.get(name)
            number = None if token is None else self.backend_tokenizer.token_to_id(token)
            setattr(self, name, token)
            setattr(self, f"{name}_id", number)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if options:
            ids: list[int] = self.hugging_face.encode(
                text, add_special_tokens=add_special_tokens, **options
            )
            return ids
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def read_renamed(self, secret: str) -> str | None:
        """The JSON of `renamed_spec` with another secret, if it was kept."""
        if self._secret is None:
            return None
        spec = (self._folder / RENAMED).read_text(encoding="utf-8")
        return spec.replace(self._secret, secret)

    def get_chat_template(self) -> str:
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        return self.chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The conversation in the words of a template. See `render_chat`."""
        template = chat_template or self.get_chat_template()
        if tokenize:
            return self.hugging_face.apply_chat_template(
                conversation, chat_template=template, **variables
            )
        return render_chat(template, conversation, **{**self.special_tokens_map, **variables})

    @cached_property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._checkpoint)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.hugging_face, memo)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "add_")) or name == "hugging_face":
            raise AttributeError(name)
        return getattr(self.hugging_face, name)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """A conversation in the words of a chat template.

    Args:
        template: The template, in jinja.
        messages: The messages, of plain JSON values. Entries without a value are left out.
        tools: JSON Schemas of tools.
        documents: Documents, for templates that have a place for them.
        add_generation_prompt: Whether the text ends where the model's answer begins.
        variables: Further variables of the template.

    Raises:
        ValueError: There is no message.
        jinja2.TemplateError: The template is malformed, or refuses the messages.
    """
    if not messages:
        raise ValueError("a chat template needs at least one message")
    return _compiled(template).render(
        messages=[_message(each) for each in messages],
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


def renders(template: str) -> bool:
    """Whether `render_chat` knows the tags of a template."""
    try:
        return bool(_compiled(template))
    except TemplateError:
        return False


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates see it: reasoning has the names that they may read."""
    given = {name: value for name, value in message.items() if value is not None}
    for name in _REASONING:
        if name in given:
            return {"thinking": given[name], **given, "reasoning_content": given[name]}
    return given


@lru_cache
def _compiled(template: str) -> Template:
    """A template in a sandbox, with the functions that transformers offers."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": _TemplateNamespace,
    }
    return sandbox.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class _TemplateNamespace(Namespace):
    """A namespace that takes no names by which Python's own objects are reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set `self`
        self, *others = args
        entries = dict(*others, **kwargs)
        for name in entries:
            _check_name(name)
        Namespace.__init__(self, entries)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template sets {name!r}, a name of Python's own")
