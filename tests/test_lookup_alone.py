"""A graph that is one tensor-train lookup: run without the inner compiler, right, and only where that is all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from comera_compile import torch_private
from comera_compile.codegen.cpu import lookup_kernels

OPTIONS: dict[str, Any] = {"rank": 4, "init": "random", "min_elements": 0}
ROWS, WIDTH = 60, 12
Compiled = Callable[..., Any]


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the inner compilers that graphs are handed to, all run operation by operation."""
    seen: list[str] = []
    inner = torch_private.compile_inner

    def spy(name: str, *arguments: Any) -> Compiled:
        seen.append(name)
        return inner("aot_eager", *arguments)

    monkeypatch.setattr(torch_private, "compile_inner", spy)
    return seen


def compiled(layer: nn.Module, **options: Any) -> Compiled:
    torch._dynamo.reset()
    made: Compiled = torch.compile(layer, backend="comera", options={**OPTIONS, **options})
    return made


def packed_of(layer: nn.Module) -> nn.Parameter:
    (packed,) = layer.parameters()
    return packed


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("lead", [(7,), (2, 3), (1, 1, 50), (0,), ()])
def test_values_and_gradients(
    lead: tuple[int, ...],
    padding: int | None,
    ids_dtype: torch.dtype,
    dtype: torch.dtype,
    bar: float,
    handed_on: list[str],
) -> None:
    layer = nn.Embedding(ROWS, WIDTH, padding_idx=padding, dtype=dtype)
    call, ids = compiled(layer), torch.randint(ROWS, lead, dtype=ids_dtype)
    rows = call(ids)
    grad = torch.randn_like(rows)
    rows.backward(grad)
    # the dense matrix in float64; the gradient of the packed vector is what the marker op makes of that of the matrix
    wide = layer.double()
    made = packed_of(layer).grad
    packed_of(wide).grad = None
    right = F.embedding(ids.long(), wide.weight, padding_idx=padding)
    right.backward(grad.double())
    exact = packed_of(wide).grad
    assert rows.dtype == dtype and rows.shape == (*lead, WIDTH) and handed_on == []
    assert made is not None and exact is not None
    for one, other in ((rows.detach(), right.detach()), (made, exact)):
        assert (one.double() - other).abs().max() <= bar * other.abs().max() if other.numel() else True


def test_without_gradients(handed_on: list[str]) -> None:
    layer, ids = nn.Embedding(ROWS, WIDTH), torch.arange(9)
    call = compiled(layer)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            rows = call(ids)
            torch.testing.assert_close(rows, layer.weight[ids], rtol=1e-5, atol=1e-5)
            assert not rows.requires_grad
    layer.requires_grad_(False)
    assert not call(ids).requires_grad and handed_on == []


class Tied(nn.Module):
    """A table and what is done with it."""

    def __init__(self, call: Callable[[Tied, Tensor], Any]) -> None:
        super().__init__()
        self.call, self.table = call, nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        return self.call(self, ids)


ELSEWHERE: dict[str, Callable[[Tied, Tensor], Any]] = {
    "something behind it": lambda m, ids: m.table(ids).relu(),
    "something before it": lambda m, ids: m.table(ids + 1),
    "its own head": lambda m, ids: m.table(ids) @ m.table.weight.t(),
    "two results": lambda m, ids: (m.table(ids), m.table(ids)),
    "written to": lambda m, ids: m.table(ids).add_(1),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_graph_with_more_in_it_is_handed_on(kind: str, handed_on: list[str]) -> None:
    model, ids = Tied(ELSEWHERE[kind]), torch.arange(5)
    made = compiled(model)(ids)
    for one, other in zip(made, model(ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert handed_on == ["inductor"]


def test_half_precision_and_missing_kernels_are_handed_on(
    handed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(5)
    compiled(nn.Embedding(ROWS, WIDTH).bfloat16())(ids).sum().backward()
    assert handed_on == ["inductor"]
    monkeypatch.setattr(lookup_kernels, "_library_for", lambda *_: None)
    layer = nn.Embedding(ROWS, WIDTH)
    torch.testing.assert_close(compiled(layer)(ids), layer.weight[ids], rtol=1e-5, atol=1e-5)
    assert handed_on == ["inductor"] * 2


def test_autocast_does_not_touch_a_lookup(handed_on: list[str]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(nn.Embedding(ROWS, WIDTH))(torch.arange(5)).dtype == torch.float32
    assert handed_on == []


def test_an_id_out_of_range_is_refused_as_in_eager(handed_on: list[str]) -> None:
    call = compiled(nn.Embedding(ROWS, WIDTH))
    call(torch.arange(5))
    for wrong in (ROWS, -1):
        with pytest.raises(IndexError, match=f"expected 0 to {ROWS - 1}, got {wrong}"):
            call(torch.tensor([0, wrong, 1, 2, 3]))
    assert call(torch.arange(5)).shape == (5, WIDTH) and handed_on == []


def test_backwards_and_writes_as_in_eager(handed_on: list[str]) -> None:
    layer, ids = nn.Embedding(ROWS, WIDTH), torch.tensor([1, 1, 4])
    call = compiled(layer)
    total = call(ids).sum()
    total.backward(retain_graph=True)
    once = packed_of(layer).grad
    assert once is not None
    once = once.clone()
    total.backward()
    torch.testing.assert_close(packed_of(layer).grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
    (first,) = torch.autograd.grad(call(ids).pow(2).sum(), packed_of(layer), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    rows = call(ids)
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()
    assert handed_on == []


def test_inside_a_checkpoint(handed_on: list[str]) -> None:
    layer, ids = nn.Embedding(ROWS, WIDTH), torch.arange(9)
    call = compiled(layer)
    call(ids).pow(2).sum().backward()
    plain = packed_of(layer).grad
    packed_of(layer).grad = None
    checkpoint(call, ids, use_reentrant=False).pow(2).sum().backward()
    torch.testing.assert_close(packed_of(layer).grad, plain)
    assert handed_on == []


def test_any_number_of_ids_in_two_compilations(handed_on: list[str]) -> None:
    layer = nn.Embedding(ROWS, WIDTH)
    call = compiled(layer)
    torch._dynamo.utils.counters.clear()
    for count in (3, 5, 17, 300, 2):
        ids = torch.randint(ROWS, (count,))
        torch.testing.assert_close(call(ids), layer.weight[ids], rtol=1e-5, atol=1e-5)
    # the second is traced again because weights became tensor trains in the first
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3 and handed_on == []


def test_report(handed_on: list[str]) -> None:
    layer = nn.Embedding(ROWS, WIDTH)
    compiled(layer)(torch.arange(5))
    shown = comera.report(layer)
    (use,) = shown["weight"].uses
    assert use.plan == "unique ids, each prefix once, grouped products, alone: without the inner compiler"
    assert shown.graphs[0].saved is not None
    assert (shown.graphs[0].saved.planned, shown.graphs[0].saved.rest) == (0, 0)  # ids and cores are inputs
