"""Does a document of one namespace make another namespace's first token faster? It must not."""

from __future__ import annotations

import socket
import statistics
from random import Random
from typing import Any

from ragcache import RagCache, SourceDocument
from ragcache_api.bench.clients import first_token, request

_WORDS = ("mooring", "lantern", "ledger", "harbour", "cable", "winch", "survey", "tide", "signal")
_SENTENCES = 24


def foreign_first_tokens(rag: RagCache, port: int, runs: int) -> dict[str, Any]:
    """First tokens of chats that paste a text in, by who has ingested it.

    own: the asker. foreign: another namespace, which has just asked the same. unknown: nobody.
    foreign_ttft_ratio: the median over neighbours of foreign to unknown; 1 is equal. Makes keys, so
    that the service is closed to callers without one.
    """
    random = Random(7)
    texts = [_text(random) for _ in range(runs)]
    rag.within("red").ingest("texts", [SourceDocument(str(n), t) for n, t in enumerate(texts)])
    red, blue = (rag.keys.create(name, "user", name)[1] for name in ("red", "blue"))
    name = rag.stats().model
    times: dict[str, list[float]] = {"own": [], "foreign": [], "unknown": []}
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(kind: str, text: str, key: str) -> None:
            body = {
                "model": name, "max_tokens": 2, "stream": True, "ignore_eos": True,
                "messages": [{"role": "user", "content": f"{text}\n\nWhat is kept there?"}],
            }  # fmt: skip
            sent = request("/v1/chat/completions", body, port, key)
            times[kind].append(first_token(link, sent))

        for number, text in enumerate(texts):
            ask("own", text, red)
            asked = [("foreign", text), ("unknown", _text(random))]
            for kind, each in asked if number % 2 else reversed(asked):
                ask(kind, each, blue)
    ratios = [f / u for f, u in zip(times["foreign"], times["unknown"], strict=True)]
    return {
        "foreign_ttft_ratio": statistics.median(ratios),
        "ttft_ms_p50_by_owner": {k: 1000 * statistics.median(v) for k, v in times.items()},
    }


def _text(random: Random) -> str:
    """As long as the others, and like none of them."""
    return " ".join(
        f"The {random.choice(_WORDS)} of berth {random.randrange(100, 999)} is by the "
        f"{random.choice(_WORDS)} {random.randrange(100, 999)}."
        for _ in range(_SENTENCES)
    )
