"""Paragraph templates: parsing and filling. FORMAT.md describes the language."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from slots import TYPES, Forms

_SLOT = re.compile(r"\{([a-z][a-z0-9_]*)(?:\.([a-z]+))?(?::\s*([a-z]+)\s*([^{}]*))?\}")
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_DROP_SHARE = 0.33


class TemplateError(ValueError):
    """A template breaks a rule of FORMAT.md; the message names the file, line and rule."""


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    optional: bool = False
    movable: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    phrasings: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    title: str
    lines: tuple[Line, ...]
    questions: tuple[Question, ...]
    definitions: dict[str, tuple[str, str]] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Filled:
    """One filling: `questions` pairs each askable question with its answer; `unanswerable` are
    questions on the same subject that this text does not answer."""

    title: str
    text: str
    questions: tuple[tuple[str, str], ...]
    unanswerable: tuple[str, ...] = ()


def parse_file(path: Path) -> list[Template]:
    templates: list[Template] = []
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), "==="], 1):
        if line.startswith("==="):
            if block:
                templates.append(_parse_block(path.name, block))
            block = [(number, line)]
        elif line.strip() and block:
            block.append((number, line.rstrip()))
    names = [t.name for t in templates]
    for name in {n for n in names if names.count(n) > 1}:
        raise TemplateError(f"{path.name}: two paragraphs are called {name!r}")
    return templates


def _parse_block(file: str, block: list[tuple[int, str]]) -> Template:
    name = block[0][1].lstrip("= ").strip()
    title, lines, questions = "", [], []
    pending: tuple[str, ...] | None = None
    for number, line in block[1:]:
        where = f"{file}:{number}"
        if line.startswith("title:"):
            title = line[6:].strip()
        elif line.startswith("Q:"):
            if pending:
                raise TemplateError(f"{where}: the question before has no answer")
            pending = tuple(p.strip() for p in re.split(r"\s\|\s", line[2:]) if p.strip())
        elif line.startswith("A:"):
            if not pending:
                raise TemplateError(f"{where}: an answer without a question")
            questions.append(Question(pending, line[2:].strip()))
            pending = None
        else:
            lines.append(_parse_line(line))
    definitions = _definitions(file, name, [title, *(line.text for line in lines)])
    template = Template(name, title, tuple(lines), tuple(questions), definitions)
    _check(file, block[0][0], template)
    return template


def _parse_line(line: str) -> Line:
    optional = movable = False
    while line[:2] in ("? ", "~ "):
        optional, movable = optional or line[0] == "?", movable or line[0] == "~"
        line = line[2:]
    return Line(line.strip(), optional, movable)


def _definitions(file: str, name: str, texts: list[str]) -> dict[str, tuple[str, str]]:
    definitions: dict[str, tuple[str, str]] = {}
    for text in texts:
        for slot, _, kind, arguments in _SLOT.findall(text):
            if kind and kind not in TYPES:
                raise TemplateError(f"{file} {name}: unknown slot type {kind!r} of {slot!r}")
            if kind:
                definitions.setdefault(slot, (kind, arguments.strip()))
    return definitions


def _check(file: str, number: int, template: Template) -> None:
    where = f"{file}:{number} {template.name}"
    if not template.title or not template.lines or not template.questions:
        raise TemplateError(f"{where}: a paragraph needs a title, a body and questions")
    texts = [template.title, *(line.text for line in template.lines)]
    texts += [text for q in template.questions for text in (*q.phrasings, q.answer)]
    for text in texts:
        for slot, *_ in _SLOT.findall(text):
            if slot not in template.definitions:
                raise TemplateError(f"{where}: slot {slot!r} is never introduced, in: {text}")
        left = _SLOT.sub("", text)
        if re.search(r"[{}]", left):
            raise TemplateError(f"{where}: not a slot (FORMAT.md): {text}")
        if re.search(r"[\[\]]", _ALTERNATIVES.sub("", left)):
            raise TemplateError(f"{where}: nested or unbalanced brackets: {text}")


def fill(template: Template, rng: random.Random) -> Filled:
    values: dict[str, Forms] = {}
    title = _render(template.title, template, values, rng)
    kept = [line for line in template.lines if not (line.optional and rng.random() < _DROP_SHARE)]
    kept = _shuffle_movable(kept, rng)
    rendered = [_render(line.text, template, values, rng) for line in kept]
    text = re.sub(r"\s+([,.;:?!])", r"\1", " ".join(" ".join(rendered).split()))
    haystack = f"{title}\n{text}".lower()
    questions, unanswerable = [], []
    for question in template.questions:
        pair = _ask(question, values, rng)
        if pair and pair[1].lower() in haystack:
            questions.append(pair)
        elif not pair and (asked := _ask_in_vain(question, values, rng)):
            unanswerable.append(asked)
    filled_title = title[:1].upper() + title[1:]
    return Filled(filled_title, text, tuple(questions), tuple(unanswerable))


def _ask(question: Question, values: dict[str, Forms], rng: random.Random) -> tuple[str, str] | None:
    """The question and its answer, or None if it speaks of a line that was dropped."""
    phrasings = list(question.phrasings)
    rng.shuffle(phrasings)
    for phrasing in phrasings:
        pieces = (phrasing, question.answer)
        if all(slot in values for text in pieces for slot, *_ in _SLOT.findall(text)):
            asked = _substitute(_alternatives(phrasing, rng), values)
            return asked[:1].upper() + asked[1:] if phrasing[:1].isupper() else asked, (
                _substitute(question.answer, values)
            )
    return None


def _ask_in_vain(question: Question, values: dict[str, Forms], rng: random.Random) -> str | None:
    """A phrasing whose answer was dropped with its line, if what it speaks of was not."""
    if all(slot in values for slot, *_ in _SLOT.findall(question.answer)):
        return None
    phrasing = rng.choice(question.phrasings)
    if any(slot not in values for slot, *_ in _SLOT.findall(phrasing)):
        return None
    asked = _substitute(_alternatives(phrasing, rng), values)
    return asked[:1].upper() + asked[1:]


def _shuffle_movable(lines: list[Line], rng: random.Random) -> list[Line]:
    result: list[Line] = []
    run: list[Line] = []
    for line in [*lines, Line("")]:
        if line.movable:
            run.append(line)
            continue
        rng.shuffle(run)
        result += [*run, line]
        run = []
    return result[:-1]


def _alternatives(text: str, rng: random.Random) -> str:
    """Picks wordings; the bars inside a slot's own choice list are not separators."""

    def pick(match: re.Match[str]) -> str:
        inside = match.group(1)
        slots = _SLOT.findall(inside)
        held = [m.group(0) for m in _SLOT.finditer(inside)]
        for i, slot in enumerate(held):
            inside = inside.replace(slot, f"\x00{i}\x00", 1)
        wording = rng.choice(inside.split("|"))
        for i in range(len(slots)):
            wording = wording.replace(f"\x00{i}\x00", held[i])
        return wording

    return _ALTERNATIVES.sub(pick, text)


def _render(
    text: str, template: Template, values: dict[str, Forms], rng: random.Random
) -> str:
    text = _alternatives(text, rng)
    for slot, _, kind, arguments in _SLOT.findall(text):
        if slot not in values:
            definition = (kind, arguments.strip()) if kind else template.definitions[slot]
            values[slot] = _fresh(definition, values, rng)
    rendered = _substitute(text, values)
    return rendered[:1].upper() + rendered[1:]


def _fresh(definition: tuple[str, str], values: dict[str, Forms], rng: random.Random) -> Forms:
    """A value that no other slot of the paragraph has, so that answers are unambiguous."""
    kind, arguments = definition
    forms = TYPES[kind](rng, arguments)
    for _ in range(8):
        if all(forms[""].lower() != other[""].lower() for other in values.values()):
            break
        forms = TYPES[kind](rng, arguments)
    return forms


def _substitute(text: str, values: dict[str, Forms]) -> str:
    def value(match: re.Match[str]) -> str:
        forms = values[match.group(1)]
        return forms.get(match.group(2) or "", forms[""])

    return _SLOT.sub(value, text)
