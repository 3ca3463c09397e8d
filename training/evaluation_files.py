"""Writes evaluation sets as folders that `ragcache ingest` and `ragcache eval` read.

    python3 training/evaluation_files.py --data DATA --out build/evaluation

Makes `held_out/` (paragraphs that training never saw, each filled once), `alike/` (a thousand register
entries, forty of them asked for) and, where the data is at hand, `xquad/` (English), `xquad_zh/` and
`chinese/` (the held-out part of CMRC), each with documents and a `questions.jsonl` beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from corpus import chinese_passages, load_templates
from registers import draw_entries
from templates import fill

Entry = tuple[str, str, list[tuple[str, list[str]]]]  # file name, text, questions with answers


def held_out(training: Path) -> Iterable[Entry]:
    rng = random.Random(11)
    _, kept = load_templates(training)
    for template in kept:
        filled = fill(template, rng)
        asked = [(q, [a]) for q, a in filled.questions]
        yield f"{template.name}.md", f"# {filled.title}\n\n{filled.text}\n", asked


def xquad(path: Path) -> Iterable[Entry]:
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        title = article["title"].replace("_", " ")
        slug = re.sub(r"\W+", "-", title.lower()).strip("-")
        for number, paragraph in enumerate(article["paragraphs"]):
            asked = [(q["question"], [a["text"] for a in q["answers"]]) for q in paragraph["qas"]]
            yield f"{slug}-{number}.md", f"# {title}\n\n{paragraph['context']}\n", asked


def alike(count: int = 1000, asked: int = 40) -> Iterable[Entry]:
    """Entries of five registers; a question is asked of each of the first `asked`."""
    rng = random.Random(13)
    entries = [e for _ in range(5) for e in draw_entries(rng, count // 5)]
    rng.shuffle(entries)
    named = {entry.title: entry for entry in entries}
    for number, (title, entry) in enumerate(named.items()):
        pairs = [(q, [a]) for q, a in entry.questions[:1]] if number < asked else []
        yield f"entry-{number:04d}.md", f"# {title}\n\n{entry.text}\n", pairs


def chinese(path: Path) -> Iterable[Entry]:
    for number, passage in enumerate(chinese_passages(path)[1]):
        yield f"paragraph-{number:03d}.md", passage.text + "\n", [(q, [a]) for q, a in passage.questions]


def write(folder: Path, entries: Iterable[Entry]) -> int:
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    rows = []
    for name, text, asked in entries:
        (folder / "documents" / name).write_text(text, encoding="utf-8")
        rows += [{"question": q, "answers": a, "document": name} for q, a in asked]
    lines = (json.dumps({"id": f"q{i:04d}", **row}) for i, row in enumerate(rows, start=1))
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    print("held_out", write(arguments.out / "held_out", held_out(Path(__file__).parent)))
    print("alike", write(arguments.out / "alike", alike()))
    sets = {"xquad": ("xquad.en.json", xquad), "xquad_zh": ("xquad.zh.json", xquad),
            "chinese": ("cmrc2018.trial.json", chinese)}  # fmt: skip
    for name, (file, entries) in sets.items():
        if (arguments.data / file).exists():
            print(name, write(arguments.out / name, entries(arguments.data / file)))


if __name__ == "__main__":
    main()
