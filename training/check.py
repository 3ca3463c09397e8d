"""Checks paragraph files: `python3 training/check.py FILE… [--show N]`."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

from templates import Template, TemplateError, fill, parse_file

FILLINGS = 40


def complaints(template: Template, rng: random.Random) -> list[str]:
    fillings = [fill(template, rng) for _ in range(FILLINGS)]
    found = []
    words = sum(len(f.text.split()) for f in fillings) / FILLINGS
    if not 50 <= words <= 230:
        found.append(f"{words:.0f} words (60 to 200 wanted)")
    if len(template.questions) < 5:
        found.append(f"{len(template.questions)} questions (5 or more wanted)")
    asked = Counter(q.answer for f in fillings for q in template.questions)
    for question in template.questions:
        times = sum(_is_asked(question.phrasings, question.answer, f, template) for f in fillings)
        if times == 0:
            found.append(f"the answer {question.answer!r} never stands in the text")
    del asked
    long = [a for f in fillings for _, a in f.questions if len(a.split()) > 8]
    if long:
        found.append(f"a long answer: {long[0]!r}")
    return found


def _is_asked(phrasings: tuple[str, ...], answer: str, filled: object, template: Template) -> bool:
    one = Template(
        template.name,
        template.title,
        template.lines,
        tuple(q for q in template.questions if q.answer == answer and q.phrasings == phrasings),
        template.definitions,
    )
    return any(fill(one, random.Random(i)).questions for i in range(6))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--show", type=int, default=0, help="print this many random fillings")
    arguments = parser.parse_args()
    rng = random.Random()
    status, templates = 0, []
    for file in arguments.files:
        try:
            parsed = parse_file(file)
        except TemplateError as error:
            print(error)
            status = 1
            continue
        templates += parsed
        for template in parsed:
            for complaint in complaints(template, rng):
                print(f"{file.name} {template.name}: {complaint}")
                status = 1
        questions = sum(len(t.questions) for t in parsed)
        print(f"{file.name}: {len(parsed)} paragraphs, {questions} questions")
    for template in rng.sample(templates, min(arguments.show, len(templates))):
        filled = fill(template, rng)
        print(f"\n== {template.name}\n# {filled.title}\n{filled.text}")
        for question, answer in filled.questions:
            print(f"  - {question}  ->  {answer}")
    return status


if __name__ == "__main__":
    sys.exit(main())
