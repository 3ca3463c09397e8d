"""Tiers as users ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel, wrap_causal
from ragcache.store import open_tiers
from tests.conftest import tiny_model

CPU = torch.device("cpu")


def test_sizes_and_kinds_are_parsed() -> None:
    chosen = open_tiers({"disk_bytes": "8GiB", "kv_dtype": "int8", "policy": "gdsf"}, CPU)
    assert (chosen["disk_bytes"], chosen["kv_dtype"], chosen["policy"]) == (8 << 30, "int8", "gdsf")
    assert (chosen["device"], chosen["remote"]) == (None, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "fifo"}, "unknown policy 'fifo'; policies: lru"),
        ({"kv_dtype": "int4"}, "unknown kv_dtype 'int4'"),
        ({"disk_bytes": "much"}, "cannot read the size 'much'"),
        ({"disk_size": 3}, "unknown option 'disk_size'; options of tiers: device_bytes"),
    ],
)
def test_invalid_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_tiers(options, CPU)


def test_an_answer_from_every_tier_is_the_same(tmp_path: Path, reader: LoadedModel) -> None:
    causal = wrap_causal(tiny_model("llama", vocab_size=len(reader.tokenizer)))
    model = LoadedModel("tiny", causal, reader.tokenizer)
    remote = f"file://{tmp_path / 'bucket'}"
    options: Any = {"remote": remote, "device_bytes": "64MiB", "max_new_tokens": 4}
    with RagCache.open(tmp_path / "state", model, **options) as rag:
        rag.ingest("notes", [SourceDocument("kiln", "The kiln is in the yard.")])
        found = {}
        for tier in ("device", "host", "disk", "remote"):
            rag.modules.move("notes", tier)
            if tier == "remote":
                rag.modules.evict("notes", tier="disk")
            answer = rag.ask("Where is the kiln?", collection="notes")
            found[answer.sources[0].tier] = answer.text
        assert set(found) == {"device", "host", "disk", "remote"}
        assert len(set(found.values())) == 1
        assert set(rag.stats().tiers) == {"device", "disk", "remote"}
