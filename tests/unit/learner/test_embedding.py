"""The embedding's gradient is torch's, added in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollwire.learner.embedding import rows_added_to_gradient

ROWS, WIDTH = 11, 4
INPUT_IDS = torch.tensor([[3, 5, 3], [0, 10, 5]])


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


def model_with(table: nn.Module) -> Any:
    return SimpleNamespace(get_input_embeddings=lambda: table)


def trained(table: nn.Embedding, passes: int, *, in_place: bool) -> Tensor | None:
    torch.manual_seed(1)
    for _ in range(passes):
        if in_place:
            with rows_added_to_gradient(model_with(table)):
                rows = table(INPUT_IDS)
        else:
            rows = table(INPUT_IDS)
        (rows * torch.randn(rows.shape)).sum().backward()
    return table.weight.grad


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("padding_id", [None, 0, 5])
def test_gradient_is_that_of_torch(kind: type[nn.Embedding], padding_id: int | None) -> None:
    torch.manual_seed(0)
    left = kind(ROWS, WIDTH, padding_idx=padding_id)
    right = kind(ROWS, WIDTH, padding_idx=padding_id)
    right.load_state_dict(left.state_dict())

    found, expected = trained(left, 2, in_place=True), trained(right, 2, in_place=False)

    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected)
    assert not found[1].any()


def test_no_gradient_of_the_whole_table_is_made() -> None:
    table = nn.Embedding(ROWS, WIDTH)
    with rows_added_to_gradient(model_with(table)):
        rows = table(INPUT_IDS)
    table.weight.grad = before = torch.ones_like(table.weight)

    rows.sum().backward()

    assert table.weight.grad is before
    assert before[3].tolist() == [3.0] * WIDTH
    assert before[1].tolist() == [1.0] * WIDTH


def test_outside_everything_is_as_before() -> None:
    table = nn.Embedding(ROWS, WIDTH)
    with rows_added_to_gradient(model_with(table)):
        pass

    (gradient,) = torch.autograd.grad(table(INPUT_IDS).sum(), [table.weight])

    assert gradient[3].tolist() == [2.0] * WIDTH


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_table_or_no_gradient_leaves_no_trace(frozen: bool) -> None:
    table = nn.Embedding(ROWS, WIDTH).requires_grad_(not frozen)
    with rows_added_to_gradient(model_with(table)), torch.set_grad_enabled(frozen):
        assert not table(INPUT_IDS).requires_grad
    assert table.weight.grad is None
