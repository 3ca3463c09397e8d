"""Experts of mixtures on a GPU, of few rows and of many, beside products one by one."""

from __future__ import annotations

import pytest
import torch

from ragcache.models.experts import FEW_PAIRS, from_experts, to_experts
from ragcache.models.routers import choose_experts, multiply_exactly

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
    values, places = choose_experts(scores, chosen)
    wanted = scores.topk(chosen)
    assert torch.equal(values, wanted.values)
    assert torch.equal(places, wanted.indices)
