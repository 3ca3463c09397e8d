"""Drafts, measured on a tiny shape: answers that quote are guessed, others are not."""

from __future__ import annotations

import pytest
from drafts import DRAFT_SHAPES, CountingModel, DraftSetting, bench_drafts, missed


@pytest.mark.slow
def test_quoting_answers_are_drafted() -> None:
    setting = DraftSetting(
        documents=2, document_tokens=64, question=4, new_tokens=40, draft_tokens=8, rounds=1
    )
    model = CountingModel(DRAFT_SHAPES["tiny"], setting, "cpu")
    other, quoting = bench_drafts(model, [2], [0, 64])
    assert (other["drafted"], other["accepted"]) == (0, 0)
    assert quoting["drafted"] >= quoting["accepted"] > 0.7
    assert quoting["ratio"] == pytest.approx(quoting["tokens_s"] / quoting["plain_tokens_s"])


def test_limits_are_of_the_lengths_of_quotations() -> None:
    rows = [{"requests": 1, "run": run, "ratio": ratio} for run, ratio in ((0, 0.98), (64, 1.7))]
    assert missed(rows) == ["1 requests in runs of 64: 1.70, must be at least 1.8"]
    assert missed([{"requests": 4, "run": 4, "ratio": 0.9}]) == [
        "4 requests in runs of 4: 0.90, must be at least 0.97"
    ]
