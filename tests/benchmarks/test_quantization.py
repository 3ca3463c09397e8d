"""Eight bits: the bounds that the docs state."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantization import bench_quantization

from ragcache.errors import NoDocuments
from ragcache.models import LoadedModel
from tests.conftest import REPOSITORY

HANDBOOK = REPOSITORY / "examples" / "handbook"


def test_eight_bits_hardly_change_how_the_reader_begins(reader: LoadedModel) -> None:
    """The bounds that docs and model card state: 95 % for int8, 90 % for fp8."""
    result = bench_quantization(reader, HANDBOOK, 20)
    assert result["questions"] == 20
    assert result["int8"]["first_token_agreement"] >= 0.95
    assert result["fp8"]["first_token_agreement"] >= 0.9
    for kind, error in (("int8", 0.01), ("fp8", 0.04)):
        assert result[kind]["bytes_share"] < 0.54
        assert 0.001 < result[kind]["keys_error"] < error
        assert 0.001 < result[kind]["values_error"] < error


def test_a_folder_without_questions_is_named(reader: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(NoDocuments, match=r"questions\.jsonl"):
        bench_quantization(reader, tmp_path, 1)
