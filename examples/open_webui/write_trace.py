"""Write `trace.jsonl`: prompts in the form in which Open WebUI sends them, over the handbook.

    python examples/open_webui/write_trace.py

Documents are split into chunks of 1,000 characters that overlap by 100, and each question gets the
three chunks with the most of its rare words, as sources in the user's message. Histories keep
questions and answers without sources, so that the chunks move in every turn. Each line has the
`messages` of a prompt and the `chunks` in it: `ragcache bench recurring --trace` reads it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from math import log
from pathlib import Path

from langchain_text_splitters import RecursiveCharacterTextSplitter

EXAMPLES = Path(__file__).parents[1]
CONVERSATIONS, TURNS, SOURCES = 6, 5, 3

INSTRUCTION = """### Task:
Answer the question from the sources below, and name the source of each statement by its id in \
brackets, such as [1].

### Rules:
- Say so if the sources do not contain the answer.
- Answer in the language of the question.
- Use no tags in your answer.

<context>
{context}
</context>

"""


def chunks_of_handbook() -> list[tuple[str, str]]:
    """Return the name of the file and the text of every chunk."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=100)
    files = sorted((EXAMPLES / "handbook").glob("*.md"))
    return [(file.name, text) for file in files for text in splitter.split_text(file.read_text())]


def words(text: str) -> set[str]:
    """Return the words of a text in lower case."""
    return set(re.findall(r"\w+", text.lower()))


def main() -> None:
    """Write the trace."""
    chunks = chunks_of_handbook()
    found = Counter(word for _, text in chunks for word in words(text))
    lines = (EXAMPLES / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in islice(lines, CONVERSATIONS * TURNS)]
    trace = []
    for number in range(CONVERSATIONS):
        history: list[dict[str, str]] = []
        for question in questions[number::CONVERSATIONS]:
            weight = {word: log(len(chunks) / found[word]) for word in words(question) & {*found}}
            best = sorted(chunks, key=lambda c: -sum(weight.get(w, 0) for w in words(c[1])))
            best = best[:SOURCES]
            context = "\n".join(
                f'<source id="{place}" name="{name}">{text}</source>'
                for place, (name, text) in enumerate(best, 1)
            )
            content = INSTRUCTION.format(context=context) + question
            messages = [*history, {"role": "user", "content": content}]
            trace.append({"messages": messages, "chunks": [text for _, text in best]})
            history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "The sources above say so [1]."},
            ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in trace)
    (EXAMPLES / "open_webui" / "trace.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
