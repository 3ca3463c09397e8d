"""Turns labelled answers (`NUMBER|answer` lines) into word positions: spans.tsv.

    python3 training/labels/convert.py --data DIR LABELS… > training/labels/spans.tsv
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def find(words: list[str], answer: list[str]) -> tuple[int, int] | None:
    for start in range(len(words) - len(answer) + 1):
        if words[start : start + len(answer)] == answer:
            return start, start + len(answer) - 1
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("labels", nargs="+", type=Path)
    arguments = parser.parse_args()
    path = arguments.data / "sentence_questions.jsonl"
    records = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]
    rows, lost = {}, 0
    for file in arguments.labels:
        for line in file.read_text(encoding="utf-8").splitlines():
            number, _, answer = line.replace("\t", "|", 1).partition("|")
            if not number.strip().isdigit() or answer.strip() == "-":
                continue
            span = find(records[int(number)]["sentence"].split(), answer.split())
            if span is None:
                lost += 1
            else:
                rows[int(number)] = span
    for number, (first, last) in sorted(rows.items()):
        print(number, first, last, sep="\t")
    print(f"{len(rows)} spans, {lost} not found in their sentences", file=sys.stderr)


if __name__ == "__main__":
    main()
