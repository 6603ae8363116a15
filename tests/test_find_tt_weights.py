"""Which uses of a packed weight are recognised, with their sides and biases; which are left; which are refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.packed_modules import Capture, Holder, assert_as_eager, linear, pack

W = Callable[..., Tensor]
ROWS, COLS = 24, 20
IDS = torch.tensor([[1, 3, 3], [0, 2, 23]])


def x(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def found(model: nn.Module, *inputs: Tensor) -> Capture:
    """The first pass alone."""
    capture = Capture("find_tt_weights")
    capture.compile(model)(*inputs)
    return capture


# Each contracts the columns of W (20), as nn.Linear does.
CONTRACT_COLUMNS: dict[str, W] = {
    "F.linear": lambda w, x: F.linear(x, w),
    "F.linear by name": lambda w, x: F.linear(input=x, weight=w, bias=None),
    "w.T": lambda w, x: x @ w.T,
    "w.mT": lambda w, x: x @ w.mT,
    "w.t()": lambda w, x: x @ w.t(),
    "torch.t": lambda w, x: torch.matmul(x, torch.t(w)),
    "transpose": lambda w, x: x.matmul(w.transpose(0, 1)),
    "matmul by name": lambda w, x: torch.matmul(x, other=w.transpose(0, 1)),
    "transpose by name": lambda w, x: x @ w.transpose(dim0=-1, dim1=-2),
    "torch.transpose": lambda w, x: torch.mm(x, torch.transpose(w, 1, 0)),
    "permute": lambda w, x: torch.mm(x, w.permute(1, 0)),
    "permute of a tuple": lambda w, x: x.mm(w.permute((-1, -2))),
    "torch.permute": lambda w, x: x @ torch.permute(w, dims=(1, 0)),
    "swapaxes": lambda w, x: x @ w.swapaxes(0, 1),
    "adjoint": lambda w, x: x @ w.adjoint(),
    "addmm": lambda w, x: torch.addmm(torch.ones(ROWS, dtype=x.dtype), x, w.t()),
}
# Each contracts the rows of W (24), as Conv1D of transformers does.
CONTRACT_ROWS: dict[str, W] = {
    "matmul": lambda w, x: x @ w,
    "mm": lambda w, x: torch.mm(x, w),
    "F.linear of the transpose": lambda w, x: F.linear(x, w.T),
    "addmm": lambda w, x: torch.addmm(torch.ones(COLS, dtype=x.dtype), x, w),
}
# Right only with the rebuilt matrix: the weight first, its entries, unusual arguments, another gradient.
LEFT_ALONE: dict[str, tuple[W, tuple[Tensor, ...]]] = {
    "weight first": (lambda w, x: w @ x, (x(COLS, 3),)),
    "einsum": (lambda w, x: torch.einsum("oi,bi->bo", w, x), (x(3, COLS),)),
    "entries": (lambda w: w.square().sum(1), ()),
    "no transpose": (lambda w, x: x @ w.permute(0, 1), (x(3, ROWS),)),
    "a slice": (lambda w, x: F.linear(x, w[:5]), (x(3, COLS),)),
    "through detach": (lambda w, x: F.linear(x, w.detach()), (x(3, COLS),)),
    "addmm with a factor": (lambda w, b, x: torch.addmm(b, x, w.t(), alpha=2), (x(ROWS), x(3, COLS))),
    "addmm of a matrix": (lambda w, b, x: torch.addmm(b, x, w.t()), (x(3, ROWS), x(3, COLS))),
    "addmm of a column": (lambda w, b, x: torch.addmm(b, x, w.t()), (x(3, 1), x(3, COLS))),
    "addmm of a number": (lambda w, b, x: torch.addmm(b, x, w.t()), (x(1), x(3, COLS))),
    "lookup in a tt": (lambda w, ids: F.embedding(ids, w), (IDS,)),
}
LOOKUPS_LEFT_ALONE: dict[str, W] = {
    "indexing": lambda w, ids: w[ids],
    "another padding row": lambda w, ids: F.embedding(ids, w, padding_idx=3),
    "gradients by frequency": lambda w, ids: F.embedding(ids, w, scale_grad_by_freq=True),
    "of a part": lambda w, ids: F.embedding(ids, w[:, 1:]),
}


@torch.library.custom_op("comera_tests::double_second", mutates_args=("w",))
def _double_second(factor: float, w: Tensor) -> None:
    w.mul_(factor)


def _double_it(w: Tensor) -> None:
    _double_second(2.0, w)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda w: w.mul_(2),
    "initialisation": nn.init.normal_,
    "function": lambda w: torch.clamp_(w, -1, 1),
    "function told to, by name": lambda w: F.relu(w, inplace=True),
    "function told to, by position": lambda w: F.dropout(w, 0.5, True, True),
    "operator of the user's": _double_it,
    "assignment": lambda w: w.__setitem__(0, 1.0),
    "augmented assignment": lambda w: operator.isub(w, 1.0),
    "out": lambda w: torch.add(w, 1, out=w),
    "list": lambda w: torch._foreach_mul_([w], 2.0),
    "transpose": lambda w: w.T.zero_(),
    "row": lambda w: w[0].zero_(),
    "view of a view": lambda w: w.T.reshape(COLS, 2, 12)[:, 0].copy_(torch.ones(COLS, 12)),
    "piece": lambda w: w.unbind(0)[1].zero_(),
    "data": lambda w: w.data.clamp_(-1, 1),
    "detached": lambda w: w.detach().fill_(0),
}


@pytest.mark.parametrize("function", CONTRACT_COLUMNS.values(), ids=CONTRACT_COLUMNS.keys())
def test_products_with_the_transpose_contract_the_columns(function: W) -> None:
    uses = found(Holder(function, ROWS, COLS), x(3, COLS)).uses
    assert [(u.kind, u.contracts) for u in uses] == [("linear", "cols")]


@pytest.mark.parametrize("function", CONTRACT_ROWS.values(), ids=CONTRACT_ROWS.keys())
def test_products_with_the_weight_itself_contract_the_rows(function: W) -> None:
    uses = found(Holder(function, ROWS, COLS), x(3, ROWS)).uses
    assert [(u.kind, u.contracts) for u in uses] == [("linear", "rows")]


@pytest.mark.parametrize("function", [*CONTRACT_COLUMNS.values(), *CONTRACT_ROWS.values()])
def test_recognised_uses_compute_what_eager_code_does(function: W) -> None:
    width = COLS if function in CONTRACT_COLUMNS.values() else ROWS
    capture = Capture()
    assert_as_eager(capture, Holder(function, ROWS, COLS), x(3, width))
    assert capture.markers == 0 and len(capture.plans) == 1


@pytest.mark.parametrize("size", [(COLS,), (1, COLS), (0, COLS), (2, 3, COLS), (2, 1, 3, COLS)])
def test_activations_of_any_dimension(size: tuple[int, ...]) -> None:
    assert len(found(Holder(lambda w, x: x @ w.T, ROWS, COLS), x(*size)).uses) == 1


def test_input_bias_and_packed_vector_are_named() -> None:
    model = linear(COLS, ROWS)
    (use,) = found(model, x(3, COLS)).uses
    assert use.bias is not None
    shapes = [tuple(n.meta["example_value"].shape) for n in (use.x, use.bias, use.packed)]
    assert shapes == [(3, COLS), (ROWS,), tuple(model._parameters["weight"].shape)]  # type: ignore[union-attr]
    assert found(linear(COLS, ROWS, bias=False), x(3, COLS)).uses[0].bias is None


@pytest.mark.parametrize(("function", "inputs"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_other_uses_are_left_and_stay_right(function: W, inputs: tuple[Tensor, ...]) -> None:
    model = Holder(function, ROWS, COLS)
    assert found(model, *inputs).uses == []
    capture = Capture()
    assert_as_eager(capture, model, *inputs)
    assert capture.markers == 0  # lowered to steps that Inductor sees into


def test_a_weight_may_have_known_and_other_uses() -> None:
    def both(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, w) * w.square().sum() + (x @ w.T) @ w @ w.T

    capture = Capture()
    assert_as_eager(capture, Holder(both, ROWS, COLS), x(3, COLS))
    assert [p.contracts for p in capture.plans] == ["cols", "cols", "rows", "cols"]


def test_a_product_of_two_weights_is_a_product_with_one_of_them() -> None:
    capture = Capture()
    assert_as_eager(capture, Holder(lambda w: w @ w.T, ROWS, COLS))
    assert [p.contracts for p in capture.plans] == ["cols"]  # x is the rebuilt matrix itself


@pytest.mark.parametrize("padding", [None, 3, -5])
def test_lookups(padding: int | None) -> None:
    table = nn.Embedding(ROWS, COLS, padding_idx=padding, dtype=torch.float64)
    zero_row = -1 if padding is None else padding % ROWS
    model = pack(table, format="ttm", zero_row=zero_row)
    (use,) = found(model, IDS).uses
    assert (use.kind, use.contracts, use.bias) == ("embedding", "rows", None)
    assert tuple(use.x.meta["example_value"].shape) == (2, 3)
    assert_as_eager(Capture(), model, IDS.clamp(max=19))


@pytest.mark.parametrize("function", LOOKUPS_LEFT_ALONE.values(), ids=LOOKUPS_LEFT_ALONE.keys())
def test_lookups_with_another_gradient_are_left(function: W) -> None:
    model = Holder(function, ROWS, COLS, format="ttm")
    assert found(model, IDS).uses == []
    assert_as_eager(Capture(), model, IDS)


def test_a_table_as_a_head_is_left() -> None:
    assert found(Holder(lambda w, x: F.linear(x, w), ROWS, COLS, format="ttm"), x(3, COLS)).uses == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_uses_inside_activation_checkpoints_are_found(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear(COLS, COLS)

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = checkpoint(self.fc, x, use_reentrant=use_reentrant)
            return inner + self.fc(x)

    capture = found(Checkpointed(), x(3, COLS).requires_grad_())
    assert [u.contracts for u in capture.uses] == ["cols", "cols"]
    assert len({u.packed.graph for u in capture.uses}) == 2  # one in the body of the higher-order op


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_in_place_writes_are_refused(write: Callable[[Tensor], Any]) -> None:
    # In a graph the dense matrix is a temporary: the write would be lost without a word.
    def forward(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(w)
        return x @ w.T

    with pytest.raises(Exception, match=r"writes in place.*option exclude"):
        found(Holder(forward, ROWS, COLS), x(3, COLS))


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_writes_to_a_copy_are_allowed(write: Callable[[Tensor], Any]) -> None:
    def forward(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(w.clone())
            write(w * 1)
        return x @ w.T

    assert len(found(Holder(forward, ROWS, COLS), x(3, COLS)).uses) == 1
