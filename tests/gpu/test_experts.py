"""Experts of mixtures on a GPU, of few rows and of many, beside products one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ragcache.models.experts import FEW_PAIRS, from_experts, only_live_rows, to_experts
from ragcache.models.routers import choose_experts, multiply_exactly, multiply_joined

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
EXPERTS, CHOSEN, SIZE, WIDTH = 16, 4, 256, 352
ROWS = (1, 2, 7, 64, 65, FEW_PAIRS // CHOSEN, FEW_PAIRS // CHOSEN + 1, 3000)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_products_equal_the_definition(rows: int, dtype: torch.dtype, *, turned: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda").to(dtype)

    hidden, inner = drawn(rows, SIZE), drawn(rows * CHOSEN, WIDTH)
    up, down = drawn(EXPERTS, SIZE, WIDTH), drawn(EXPERTS, WIDTH, SIZE)
    if turned:
        up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (up, down))
    experts = drawn(rows, EXPERTS).float().topk(CHOSEN).indices
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    found, order = to_experts(hidden, up, experts, False)
    chosen = experts.flatten()[order]
    for number in range(EXPERTS):
        pairs = (chosen == number).nonzero()[:, 0]
        expected = hidden.double()[order[pairs] // CHOSEN] @ up[number].double()
        assert (found[pairs].double() - expected).norm() <= bound * expected.norm() + 1e-9
    gate, values = found.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * values
    found, _ = to_experts(hidden, up, experts, True)
    assert (found.double() - expected).norm() <= 2 * bound * expected.norm()
    found = from_experts(inner, down, experts, order)
    for number in range(EXPERTS):
        pairs = (chosen == number).nonzero()[:, 0]
        expected = inner[pairs].double() @ down[number].double()
        assert (found[order[pairs]].double() - expected).norm() <= bound * expected.norm() + 1e-9


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (60, 4), (64, 6)])
@pytest.mark.parametrize("rows", [2, 33, 3000])
def test_routers_choose_and_multiply_as_pytorch(rows: int, experts: int, chosen: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    hidden = torch.randn(rows, 512, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(experts, 512, generator=generator, device="cuda").bfloat16()
    scores = multiply_exactly(hidden, weight)
    expected = hidden.double() @ weight.double().t()
    assert scores.dtype == torch.float32
    assert (scores.double() - expected).norm() <= 1e-6 * expected.norm()
    values, places = choose_experts(scores, chosen, False)
    wanted = scores.topk(chosen)
    assert torch.equal(values, wanted.values)
    assert torch.equal(places, wanted.indices)
    values, places = choose_experts(scores, chosen, True)
    torch.testing.assert_close(values, scores.softmax(-1).gather(1, places))
    torch.testing.assert_close(values, scores.softmax(-1).topk(chosen).values)


@pytest.mark.parametrize("live", [0, 3, 24, 32])
def test_padding_has_no_experts(live: int) -> None:
    hidden = torch.randn(32, SIZE, device="cuda").bfloat16()
    up = torch.randn(EXPERTS, SIZE, 2 * WIDTH, device="cuda").bfloat16() / 16
    down = torch.randn(EXPERTS, WIDTH, SIZE, device="cuda").bfloat16() / 16
    experts = torch.rand(32, EXPERTS, device="cuda").topk(CHOSEN).indices
    expected = from_experts(*_up(hidden, up, experts, down))
    hidden[live:] = torch.nan
    with only_live_rows(torch.tensor([live], dtype=torch.int32, device="cuda")):
        found = from_experts(*_up(hidden, up, experts, down))
    assert torch.equal(found[: live * CHOSEN], expected[: live * CHOSEN])
    assert not found[live * CHOSEN :].any()


def _up(hidden: Tensor, up: Tensor, experts: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    found, order = to_experts(hidden, up, experts, True)
    return found, down, experts, order


@pytest.mark.parametrize("joined", [False, True])
def test_small_products_are_one(joined: bool) -> None:
    sizes = 512, 64, 1
    whole = torch.randn(584, SIZE, device="cuda").bfloat16()
    weights = list(whole[: sum(sizes)].split(sizes))
    if not joined:
        weights = [each.clone() for each in weights]
    rows = torch.randn(33, SIZE, device="cuda").bfloat16()
    found = multiply_joined(rows, weights)
    expected = rows.double() @ whole[: sum(sizes)].double().t()
    assert found.shape == (33, 584)
    assert (found[:, : sum(sizes)].double() - expected).norm() <= 4e-3 * expected.norm()
