"""The operator `ragcache::attend`: the step that it finds, its shape, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ragcache.attention.triton.operator import OperatorMetadata, attend, register_step
from tests.ragcache.attention.triton.own_tokens import OwnTokens

SCALE = 0.25


class ReturnsItsQuery:
    def attend(self, layer: int, query: Tensor, *_others: object) -> Tensor:
        return query


def tokens(rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, rows, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, rows, 16, generator=generator)
    return query, key, value


def test_the_step_of_the_handle_attends() -> None:
    first, second = OwnTokens(), OwnTokens()
    register_step(first)
    handle = register_step(second)
    out = attend(*tokens(), torch.tensor(3), SCALE, handle)
    assert out.shape == (1, 5, 4, 16)
    assert (first.layers, second.layers) == ([], [3])
    torch.testing.assert_close(out, OwnTokens().attend(0, *tokens(), SCALE))


def test_an_ended_step_is_not_found() -> None:
    handle = register_step(OwnTokens())
    with pytest.raises(KeyError):
        attend(*tokens(), torch.tensor(0), SCALE, handle)


@pytest.mark.slow
def test_the_operator_passes_the_checks_of_pytorch() -> None:
    step = OwnTokens()
    arguments = (*tokens(), torch.tensor(1), SCALE, register_step(step))
    torch.library.opcheck(torch.ops.ragcache.attend.default, arguments)


def test_an_output_that_aliases_an_input_is_refused() -> None:
    step = ReturnsItsQuery()
    handle = register_step(step)
    with pytest.raises(RuntimeError, match="alias"):
        attend(*tokens(), torch.tensor(0), SCALE, handle)


def test_metadata_writes_no_states() -> None:
    step = OwnTokens()
    metadata = OperatorMetadata(register_step(step))
    _, key, value = tokens()
    metadata.write_states(0, key, value)
    assert step.layers == []
