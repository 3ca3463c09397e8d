"""Retrieval of follow-up questions, on 50 conversations of two turns over the example handbook.

    python benchmarks/follow_ups.py [--model MODEL]

Three searches are compared: the user's last message alone, the message joined with earlier words,
and the message as a model rewrote it. Printed is how often the wanted document is found first, and
among the first four.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ragcache import GenerationParams, RagCache
from ragcache.retrieval.follow_ups import search_query
from ragcache_api.cli.console import example_handbook

REWRITE = (
    "Conversation:\n{said}\n\nRewrite the user's last message as one question that can be "
    "understood without the conversation. Keep a message that can be understood by itself as it "
    "is. Write only the question."
)

PAIRS = Path(__file__).with_suffix(".jsonl")
"""Each line has a question, its answer, the message that follows, and the document that answers the
message. The first 38 messages continue the subject, the others change it."""


def conversations() -> list[tuple[str, list[dict[str, str]]]]:
    """Return the documents that hold the answers, each with the messages that ask for it."""
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    roles = ("user", "assistant", "user")
    return [
        (
            row["document"],
            [
                {"role": role, "content": text}
                for role, text in zip(roles, row["messages"], strict=True)
            ],
        )
        for row in rows
    ]


def rewritten(rag: RagCache, messages: list[dict[str, str]]) -> str:
    """Return the last message as a question by itself, in the model's words."""
    said = "\n".join(f"{each['role'].title()}: {each['content']}" for each in messages)
    asked = {"role": "user", "content": REWRITE.format(said=said)}
    answer = rag.chat([asked], recognize=False, generation=GenerationParams(max_tokens=40))
    return answer.text or messages[-1]["content"]


def measure(rag: RagCache, query_of: Callable[[list[dict[str, str]]], str]) -> str:
    """Search for the last message of each conversation, and count the documents found."""
    first = among = 0
    began = time.perf_counter()
    every = conversations()
    for document, messages in every:
        hits = rag.retrieve(query_of(messages), collection="handbook", k=4).hits
        found = [hit.module.document for hit in hits]
        first, among = first + (found[:1] == [document]), among + (document in found)
    seconds = (time.perf_counter() - began) / len(every)
    return f"first {first}, among four {among}, of {len(every)}; {1000 * seconds:.0f} ms each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model that rewrites messages")
    model = parser.parse_args().model
    with (
        tempfile.TemporaryDirectory() as folder,
        RagCache.open(folder, model, embedding="none") as rag,
    ):
        rag.ingest("handbook", [example_handbook()])
        print("last message:", measure(rag, lambda messages: messages[-1]["content"]))
        print("joined:      ", measure(rag, search_query))
        if model is not None:
            print("rewritten:   ", measure(rag, lambda messages: rewritten(rag, messages)))


if __name__ == "__main__":
    main()
