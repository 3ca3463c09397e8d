"""The dtypes that `auto` chooses for a model and its states, which answer as float32 does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel, dtype_name, load_model, wrap
from ragcache.models import dtype as choosing
from ragcache.models.dtype import (
    MEMORY_SHARE,
    choose_compute,
    choose_states,
    faster_dtype,
    largest_linear,
    parse_dtype,
)
from tests.ragcache.models.reference import tiny_gemma
from tests.tiny_models import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def half_model(tmp_path: Path, reader: LoadedModel) -> Path:
    """A folder with a tiny model in bfloat16."""
    sizes = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 2048}
    tiny_model("llama", **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    reader.tokenizer.save_pretrained(tmp_path / "half")
    return tmp_path / "half"


Times = Callable[[float], list[torch.dtype]]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Makes bfloat16 take so many times as long as float32. Returns the dtypes that are timed."""

    def take(ratio: float) -> list[torch.dtype]:
        timed = []

        def seconds(_out: int, _in: int, dtype: torch.dtype) -> float:
            timed.append(dtype)
            return 1e-3 if dtype == torch.float32 else ratio * 1e-3

        monkeypatch.setattr(choosing, "linear_seconds", seconds)
        return timed

    return take


def test_a_machine_slow_in_bfloat16_computes_in_float32(half_model: Path, times: Times) -> None:
    times(5.0)
    slow = load_model(half_model)
    assert (slow.causal.dtype, slow.causal.states_dtype) == (torch.float32, torch.bfloat16)
    assert slow.causal.model.config.dtype == torch.float32
    assert slow.dtypes is not None
    assert "1.00 ms in float32, 5.00 ms in bfloat16" in slow.dtypes.reason
    times(1.2)
    quick = load_model(half_model)
    assert (quick.causal.dtype, quick.causal.states_dtype) == HALVES[:1] * 2
    assert quick.dtypes is not None
    assert quick.dtypes.reason.startswith("bfloat16, as the checkpoint: 32 rows through a layer of")


def test_keys_tell_what_states_were_computed_and_kept_in(half_model: Path) -> None:
    prints = {
        load_model(half_model, dtype=compute, states_dtype=states).causal.fingerprint
        for compute in ("float32", "bfloat16")
        for states in ("float32", "bfloat16")
    }
    assert len(prints) == 4


def test_a_folder_keeps_its_dtype_however_busy_the_machine_is(
    half_model: Path, times: Times, notes: Path, tmp_path: Path
) -> None:
    times(5.0)
    with RagCache.open(tmp_path / "state", half_model, embedding="none") as rag:
        rag.ingest("n", [notes])
        dtype = rag.internals.shared.model.causal.dtype
    timed = times(1.2)
    with RagCache.open(tmp_path / "state", half_model, embedding="none") as rag:
        assert rag.internals.shared.model.causal.dtype == dtype == torch.float32
        log_shares(rag, "rooted")
        assert rag.stats().encoded == 0
    assert timed == []


def test_a_float32_checkpoint_stays_so_and_nothing_is_timed(
    reader: LoadedModel, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = times(0.1)
    assert choose_compute(reader.causal.model, CPU) == (torch.float32, "float32, as the checkpoint")
    half = tiny_model("llama").to(torch.float16)
    dtype, reason = choose_compute(half, GPU)
    assert (dtype, reason) == (torch.float16, "float16, as the checkpoint: a GPU is fast in it")
    half.is_quantized = True
    assert choose_compute(half, CPU)[0] == torch.float16
    assert timed == []


@pytest.mark.parametrize("own", HALVES)
def test_float32_must_be_clearly_faster_and_fit(own: torch.dtype) -> None:
    name, size = dtype_name(own), (4864, 896)

    def choose(ratio: float, needed: int, free: int) -> tuple[torch.dtype, str]:
        return faster_dtype(own, size, {own: ratio, torch.float32: 1.0}, needed, free)

    assert choose(5.0, 10, 100)[0] == torch.float32
    assert choose(1.4, 10, 100)[0] == own
    assert choose(0.3, 10, 100)[0] == own
    assert choose(5.0, int(100 * MEMORY_SHARE), 100)[0] == torch.float32
    dtype, reason = choose(5.0, 80_000, 100_000)
    assert dtype == own
    assert reason.startswith(f"{name}, though 32 rows through a layer of 896 x 4,864 take")
    assert reason.endswith("would take 80,000 bytes of the 100,000 that are free")


def test_states_are_kept_in_the_narrower_dtype() -> None:
    full, half, small = torch.float32, *HALVES
    assert choose_states(None, half, full, CPU) == half
    assert choose_states(None, full, half, CPU) == half
    assert choose_states(None, small, half, CPU) == half
    assert choose_states(full, half, half, CPU) == full
    assert choose_states(None, half, full, GPU) == full
    assert choose_states(half, half, half, GPU) == half
    with pytest.raises(ConfigurationError, match="in the model's dtype, float32; leave"):
        choose_states(half, half, full, GPU)


def test_unknown_dtypes_are_named(tmp_path: Path) -> None:
    assert parse_dtype("auto") is None
    assert parse_dtype("float16") == parse_dtype(torch.float16) == torch.float16
    with pytest.raises(ConfigurationError, match="'int4' is not a dtype of models; give auto, fl"):
        load_model(dtype="int4")
    with pytest.raises(ConfigurationError, match="states_dtype is 'fp32'"):
        RagCache.open(tmp_path / "state", states_dtype="fp32")


def test_the_largest_layer_is_no_embedding() -> None:
    model = tiny_model("llama", vocab_size=5000)
    sizes = {tuple(w.shape) for n, w in model.named_parameters() if "mlp" in n}
    assert largest_linear(model) in sizes


def log_shares(rag: RagCache, mode: str) -> dict[int, float]:
    """The likeliest first tokens of an answer, with the logarithms of their shares."""
    from ragcache import GenerationParams

    greedy = GenerationParams(max_tokens=1, logprobs=5)
    answer = rag.ask("Where is the spare key?", collection="n", k=3, mode=mode, generation=greedy)
    return dict(answer.choices[0].chosen[0].alternatives)


@pytest.mark.slow
def test_states_in_bfloat16_answer_as_float32_ones(
    half_model: Path, notes: Path, tmp_path: Path
) -> None:
    """The same compute over states kept in half of the bytes."""
    found: list[dict[int, float]] = []
    sizes: list[int] = []
    for kept in ("float32", "bfloat16"):
        where: Any = {"dtype": "float32", "states_dtype": kept}
        with RagCache.open(tmp_path / kept, half_model, **where) as rag:
            rag.ingest("n", [notes])
            found.append(log_shares(rag, "rooted"))
            sizes.append(rag.stats().tiers["host"]["nbytes"])
        with RagCache.open(tmp_path / kept, half_model, **where) as rag:
            again = log_shares(rag, "rooted")
            assert again == pytest.approx(found[-1], abs=1e-5), "from the disk"
            assert rag.stats().encoded == 0
    assert sizes[1] < 0.6 * sizes[0]
    exact, half = found
    common = exact.keys() & half.keys()
    assert len(common) >= 4
    assert max(abs(exact[n] - half[n]) for n in common) < 5e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "mpt"])
def test_every_way_of_reading_takes_states_of_another_dtype(family: str) -> None:
    """Segments, ALiBi, and the contiguous buffer."""
    from ragcache.engine import EncodeJob, Request, assemble_context, complete, encode
    from ragcache.engine.sampling_params import SamplingParams

    outputs = []
    for kept in (torch.float32, torch.bfloat16):
        causal = wrap(tiny_gemma(family) if family == "gemma2" else tiny_model(family))
        causal.states_dtype = kept
        jobs = [EncodeJob(range(5, 25), 0), EncodeJob(range(30, 60), 20)]
        states = list(encode(causal, jobs))
        assert all(each.keys.dtype == each.values.dtype == kept for each in states)
        context = assemble_context(states, [7, 8, 9], window=causal.window, max_tokens=1)
        [output] = complete(causal, [Request(context, 1, sampling=SamplingParams(logprobs=3))])
        outputs.append(output)
    first, second = (dict(out.choices[0].chosen[0].alternatives) for out in outputs)
    common = first.keys() & second.keys()
    assert common
    assert all(abs(first[n] - second[n]) < 1e-2 for n in common)
