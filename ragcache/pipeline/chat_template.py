"""Chat templates, rendered so that no document or message can produce a control token.

A template writes control tokens such as `<|im_end|>` into its text. A document, an argument or a
message that spells one must stay ordinary text. Until the text is tokenized, characters of a
private plane of Unicode, which contents may not hold, represent tokens and letters:

    U+100000 + n   control token n, written by the template (a mark)
    U+10F000 + n   letter n of the control tokens, in a content (a stand-in)
    U+10FFFD       precedes a whole control token that a content spells

Schemas and PML prompts need marks only, because their contents are inserted into rendered text. The
template of a chat trims, splits and inspects the contents itself, and returns a single string. So
`ControlTokenEscaper` hides the control tokens of contents behind stand-ins before the template
runs, and reveals them after `ChatTemplate.mark` has marked the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from ragcache.config import check_instruction
from ragcache.errors import ConfigurationError, InvalidRequest
from ragcache.models import LoadedModel, render_undated
from ragcache.models.tokenizer import control_tokens

_FIRST = 0x100000  # first mark: plane 16, for private use
_FIRST_STAND_IN = 0x10F000  # first stand-in, above the marks
_WRITTEN = "\U0010fffd"  # precedes a whole control token that a content spells
_SHORT = 64  # characters of a text that is hidden once and then remembered
MARK = re.compile("([\U00100000-\U0010fffd])")

UNKNOWN_TEMPLATE = "{content}\n"
"""Template of a message for models without a chat template."""
_OWN_VARIABLES = frozenset(
    "messages conversation tools documents chat_template add_generation_prompt "
    "continue_final_message tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs bos_token eos_token strftime_now".split()
)
ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]
"""A message as Hugging Face's chat templates take it.

`{"role": ..., "content": ...}`, with `tool_calls`, `tool_call_id` or `name` if they apply."""


def find_mark(text: str) -> re.Match[str] | None:
    """Return the first private character of a text, which could pass for a mark."""
    return None if text.isascii() else MARK.search(text)


class ChatTemplate:
    """Renders schemas and chats with the model's chat template, and tokenizes the result."""

    def __init__(self, model: LoadedModel, kwargs: Mapping[str, Any] | None = None) -> None:
        """Use the template of `model`.

        Args:
            model: The model.
            kwargs: Variables of the template, such as `enable_thinking`. `template_kwargs` checks
                them.
        """
        self.model = model
        self.kwargs = dict(kwargs or {})
        tokenizer = self._tokenizer = model.prompt_tokenizer
        self.control = list(tokenizer.control)
        self._marks = {token: chr(_FIRST + i) for i, token in enumerate(self.control)}
        self._names = {ord(mark): tokenizer.spell(token) for token, mark in self._marks.items()}
        some = "|".join(map(re.escape, self.control)) or "(?!)"
        self._spelled = re.compile(some)
        special = set(model.tokenizer.all_special_tokens)
        special |= {t.content for t in model.tokenizer.added_tokens_decoder.values() if t.special}
        self._escaper = ControlTokenEscaper(self.control, set(self.control) - special)

    def render(self, messages: Sequence[tuple[str, str]], *, generate: bool) -> str:
        """Render a schema's texts, with marks for control tokens (`ragcache_schemas.Render`).

        A template that mentions today's date gets a fixed date, so that the states stay valid.
        """
        tokenizer = self.model.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            return "".join(UNKNOWN_TEMPLATE.format(content=content) for _, content in messages)
        chat = [{"role": role, "content": content} for role, content in messages]
        return self.mark(render_undated(tokenizer, chat, generate=generate, kwargs=self.kwargs))

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat up to the begin of the answer, with marks for control tokens.

        Control tokens in messages become ordinary text. Tokens that are not special, such as
        `</think>`, remain in the model's own messages: the model wrote them, and templates look for
        them.

        A template without a place for tools leaves them out. Calls and results of tools in the
        messages are then written as text.

        Args:
            messages: The messages.
            tools: Tools that the model may call.
            kwargs: Variables of the template for this chat. They override the variables of all.

        Raises:
            InvalidRequest: A message is malformed, or the template refuses the messages.
        """
        checked = check_messages(messages)
        chat = [self._hidden(each) for each in checked]
        offered = [self._escaper.hide(tool) for tool in tools or ()]
        variables = self.kwargs | template_kwargs(self.model.tokenizer, kwargs)
        if _uses_tools(chat) and not self._has_tool_calls(chat, offered, variables):
            chat = _without_tool_calls(chat)
        text = self._apply(chat, offered, variables)
        hidden = (chat, offered) != (checked, list(tools or ()))
        return self._escaper.reveal(self.mark(text)) if hidden else self.mark(text)

    def _hidden(self, message: dict[str, Any]) -> dict[str, Any]:
        """Hide the control tokens of a checked message, nearly always in its content alone."""
        generated = message["role"] == "assistant"
        if len(message) > len(("role", "content")):
            hidden: dict[str, Any] = self._escaper.hide(message, generated=generated)
            return hidden
        return message | {"content": self._escaper.hide(message["content"], generated=generated)}

    def _has_tool_calls(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> bool:
        """Tell whether the template takes the tool calls and results of a chat."""
        bare = [{k: v for k, v in each.items() if k != "tool_calls"} for each in chat]
        try:
            text = self._apply(chat, tools, kwargs)
            return bare == chat or text != self._apply(bare, tools, kwargs)
        except InvalidRequest:
            return False

    def plain(self, text: str) -> str:
        """Return a text that takes no template, checked.

        Raises:
            InvalidRequest: The text is empty or holds a private character.
        """
        if not text:
            raise InvalidRequest("the prompt is empty; give a text, or messages")
        self._escaper.hide(text)
        return text

    @cached_property
    def lead(self) -> list[int]:
        """The token that the tokenizer puts before every text. Empty if there is none."""
        begin = self.model.tokenizer.bos_token_id
        return [begin] if begin in self.model.tokenizer.encode("")[:1] else []

    def mark(self, rendered: str) -> str:
        """Replace the control tokens of rendered text with marks."""

        def marked(found: re.Match[str]) -> str:
            written = found.start() > 0 and rendered[found.start() - 1] == _WRITTEN
            return found[0] if written else self._marks[found[0]]

        return self._spelled.sub(marked, rendered)

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Tokenize a text. Marks become control tokens, everything else is ordinary text.

        Args:
            text: The text.
            first: Whether the text begins the prompt.
        """
        written = text.translate(self._names) if find_mark(text) else text
        return self._tokenizer.encode(written, first=first)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.encode(text))

    @staticmethod
    def check(text: str) -> None:
        """Refuse a document or schema that holds a private character.

        Raises:
            ConfigurationError: The text holds a private character.
        """
        if found := find_mark(text):
            line = text.count("\n", 0, found.start()) + 1
            raise ConfigurationError(
                f"line {line} holds the private character U+{ord(found[0]):X}, which is reserved "
                "for control tokens; remove it"
            )

    def _apply(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> str:
        if getattr(self.model.tokenizer, "chat_template", None) is None:
            return "".join(UNKNOWN_TEMPLATE.format(**message) for message in chat)
        try:
            text: str = self.model.tokenizer.apply_chat_template(
                chat, tools=tools or None, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}"
            ) from error
        return text


def template_kwargs(tokenizer: Any, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return variables of the model's chat template, such as `enable_thinking`, checked.

    Raises:
        InvalidRequest: The template does not know a variable, ragcache sets it itself, or its value
            could become a control token.
    """
    given = dict(kwargs or {})
    if not given:
        return given
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    for name in given:
        if name in _OWN_VARIABLES:
            raise InvalidRequest(
                f"the chat template's variable {name!r} is set by ragcache itself; leave it out of "
                "chat_template_kwargs"
            )
        if not name.isidentifier() or not any(re.search(rf"\b{name}\b", t) for t in texts):
            raise InvalidRequest(
                f"this model's chat template has no variable {name!r}; leave it out of "
                "chat_template_kwargs, or look at the template for its name"
            )
    if ControlTokenEscaper(list(control_tokens(tokenizer))).hide(given) != given:
        raise InvalidRequest(
            "a value in chat_template_kwargs holds a control token of the model, or the edge of "
            "one; control tokens come from the template alone"
        )
    return given


def resolve_instruction(model: LoadedModel, instruction: str | None) -> str:
    """Return the instruction that precedes documents, checked. Defaults to the model's.

    Raises:
        ConfigurationError: The instruction is blank, or could become a control token.
    """
    if instruction is None:
        return model.instruction
    check_instruction(instruction)
    ChatTemplate.check(instruction)
    control = list(control_tokens(model.tokenizer))
    if ControlTokenEscaper(control).hide(instruction) != instruction:
        raise ConfigurationError(
            "the instruction holds a control token of the model, or the edge of one; control "
            "tokens come from the chat template alone"
        )
    return instruction


class ControlTokenEscaper:
    """Hides control tokens that occur in contents, and reveals them again.

    A private character replaces the first letter of every such token, and a letter at an edge of a
    content that could form a token together with the template's text. Visible tokens, which are not
    special, such as `</think>`, stay whole behind a private character: templates look for them in
    earlier answers (Qwen's template cuts an answer there).

    Args:
        control: The tokenizer's control tokens, the longest first.
        visible: Control tokens that a template still finds in contents.

    Example:
        >>> escaper = ControlTokenEscaper(["<|end|>"])
        >>> hidden = escaper.hide("Say <|end|>.")
        >>> len(hidden), "<|end|>" in hidden
        (12, False)
        >>> escaper.reveal(hidden)
        'Say <|end|>.'
        >>> escaper.hide("It begins: <|e") == "It begins: <|e"  # the template could go on "nd|>"
        False
    """

    def __init__(self, control: Sequence[str], visible: Collection[str] = ()) -> None:
        letters = sorted({letter for token in control for letter in token})
        self._hidden = {letter: chr(_FIRST_STAND_IN + i) for i, letter in enumerate(letters)}
        self._revealed = {ord(each): letter for letter, each in self._hidden.items()}
        self._revealed[ord(_WRITTEN)] = ""
        self._visible = frozenset(visible)
        self._control = tuple(control)
        self._firsts = {token[0] for token in control}
        self._lasts = {token[-1] for token in control}
        self._begins = {token[:i] for token in control for i in range(1, len(token))}
        self._ends = {token[i:] for token in control for i in range(1, len(token))}
        self._longest = max(map(len, control), default=0)
        self._hide_short = lru_cache(1024)(self._hide_text)

    def hide(self, value: Any, *, generated: bool = False) -> Any:
        """Hide the control tokens in every text of a message or a tool.

        Args:
            value: The message, the tool, or a value in it.
            generated: Whether the model wrote it. Visible tokens then remain control tokens.

        Raises:
            InvalidRequest: A text holds a private character.
        """
        if isinstance(value, str):
            return self._hide(value, generated=generated)
        if isinstance(value, Mapping):
            return {
                self._hide(key, ends=False) if isinstance(key, str) else key: self.hide(
                    each, generated=generated
                )
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(each, generated=generated) for each in value]
        return value

    def reveal(self, text: str) -> str:
        """Return the text with its original letters."""
        return text.translate(self._revealed)

    def _hide(self, text: str, *, ends: bool = True, generated: bool = False) -> str:
        """Hide a text. `ends`: whether text of the template may directly adjoin it."""
        hide = self._hide_short if len(text) <= _SHORT else self._hide_text  # keys, roles, history
        return hide(text, ends, generated)

    def _hide_text(self, text: str, ends: bool, generated: bool) -> str:
        if found := find_mark(text):
            raise InvalidRequest(
                f"a message holds the private character U+{ord(found[0]):X}, which is reserved "
                "for control tokens; remove it"
            )
        whole = dict(self._tokens_in(text))
        shown = {at for at, token in whole.items() if token in self._visible}
        places = whole.keys() - shown
        if ends:
            places |= self._edges(text)
        if not (places or shown):
            return text
        parts, done = [], 0
        for at in sorted(places if generated else places | shown):
            parts += [text[done:at], _WRITTEN if at in shown and not generated else ""]
            parts.append(self._hidden[text[at]] if at in places else text[at])
            done = at + 1
        return "".join([*parts, text[done:]])

    def _tokens_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the places of control tokens, the longest one of each place."""
        for letter in self._firsts:
            at = text.find(letter)
            while at >= 0:
                if text.startswith(self._control, at):
                    yield at, next(each for each in self._control if text.startswith(each, at))
                at = text.find(letter, at + 1)

    def _edges(self, text: str) -> set[int]:
        """Return the places of partial control tokens that the template could complete."""
        first, end = len(text) - len(text.lstrip()), len(text.rstrip())
        most = min(self._longest, end - first)
        places = set[int]()
        if not self._firsts.isdisjoint(text[end - most : end]):
            places = {end - n for n in range(1, most + 1) if text[end - n : end] in self._begins}
        if not self._lasts.isdisjoint(text[first : first + most]):
            head = (text[first : first + n] for n in range(1, most + 1))
            places |= {first} if any(each in self._ends for each in head) else set()
        return places


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates take them.

    Raises:
        InvalidRequest: There are none, or one is malformed.
    """
    checked = [_checked(message, number) for number, message in enumerate(messages, 1)]
    if not checked:
        raise InvalidRequest("there are no messages; give one of the user at least")
    return checked


def _uses_tools(chat: Sequence[Message]) -> bool:
    return any(each["role"] == "tool" or each.get("tool_calls") for each in chat)


def _without_tool_calls(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with tool calls as text of the model, and results as text of the user.

    Neighbors of one role become one message, because many templates want roles to alternate.
    """
    plain: list[dict[str, Any]] = []
    for message in chat:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        parts = [message["content"], *(json.dumps(call, ensure_ascii=False) for call in calls)]
        content = "\n".join(filter(None, parts))
        role = "user" if message["role"] == "tool" else message["role"]
        if plain and plain[-1]["role"] == role != "system":
            plain[-1]["content"] += f"\n\n{content}"
        else:
            plain.append({"role": role, "content": content})
    return plain


def _checked(message: Message, number: int) -> dict[str, Any]:
    """Return a message as templates take it. Raises `InvalidRequest` if it is malformed."""
    if not isinstance(message, dict | Mapping):  # a dict is one at first sight
        raise InvalidRequest(
            f"message {number} is no mapping; write {{'role': ..., 'content': ...}}"
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(
            f"message {number} has the unknown role {role!r}; roles: {', '.join(ROLES)}"
        )
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InvalidRequest(
            f"the content of message {number} is {type(content).__name__}, not text; images and "
            "other media are not served"
        )
    return {**message, "content": content}
