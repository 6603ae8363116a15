"""The marker op: the dense meaning of a packed weight, under every transformation that torch may apply to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comera_compile.errors import ShapeError
from comera_compile.tt.marker import MARKERS, decode, tt_weight, tt_weight_backward
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape

Near = Callable[..., None]
SHAPES = {
    "tt": TTShape("tt", 6, 10, (3, 2), (2, 5), (1, 2, 3, 4, 1), 1.5),
    "tt, padded, zero row": TTShape("tt", 5, 7, (3, 2), (2, 4), (1, 2, 3, 4, 1), 0.5, 2),
    "ttm": TTShape("ttm", 6, 8, (3, 2), (2, 4), (1, 5, 1), 0.9),
    "ttm, padded, zero row": TTShape("ttm", 5, 7, (3, 2), (2, 4), (1, 3, 1), 0.9, 4),
    "tt, order 1": TTShape("tt", 4, 6, (4,), (6,), (1, 3, 1), 0.5),
    "tt, orders 3 and 1": TTShape("tt", 11, 5, (3, 2, 2), (5,), (1, 3, 4, 5, 1), 1.2),
    "tt, order 4": TTShape("tt", 24, 16, (3, 2, 2, 2), (2, 2, 2, 2), (1, 3, 4, 3, 6, 5, 4, 2, 1), 0.7),
    "ttm, order 1": TTShape("ttm", 4, 6, (5,), (6,), (1, 1), 0.5, 1),
    "ttm, order 4": TTShape("ttm", 36, 24, (3, 2, 3, 2), (2, 3, 2, 2), (1, 3, 5, 2, 1), 0.7),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@every_shape
def test_it_is_the_dense_matrix(shape: TTShape, assert_near: Near) -> None:
    packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
    dense, expected = tt_weight(packed, shape.encode()), to_dense(packed, shape)
    assert dense.is_contiguous()
    assert_near(dense.detach(), expected.detach())
    grad = torch.randn_like(dense)
    assert_near(*(torch.autograd.grad(m, packed, grad)[0] for m in (dense, expected)))


@every_shape
def test_gradcheck(shape: TTShape) -> None:
    packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: tt_weight(p, shape.encode()), packed)


@every_shape
def test_it_keeps_the_rules_of_custom_ops(shape: TTShape) -> None:
    # Schema, fake tensors against real ones, autograd registration, AOT dispatch.
    packed = torch.randn(shape.numel, requires_grad=True)
    torch.library.opcheck(tt_weight, (packed, shape.encode()))
    grad = torch.randn(shape.rows, shape.cols)
    torch.library.opcheck(tt_weight_backward, (packed.detach(), grad, shape.encode()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    shape = SHAPES["tt"]
    packed = torch.randn(shape.numel).to(dtype).requires_grad_()
    dense = tt_weight(packed, shape.encode())
    (gradient,) = torch.autograd.grad(dense.sum(), packed)
    assert dense.dtype == gradient.dtype == dtype


@every_shape
def test_autocast_does_not_change_what_the_weight_is(shape: TTShape) -> None:
    # Rebuilt in half precision, the weight would differ from what the op's fake promises and from what is trained.
    packed = torch.randn(shape.numel, requires_grad=True)
    plain = tt_weight(packed, shape.encode())
    with torch.autocast("cpu", torch.bfloat16):
        inside = tt_weight(packed, shape.encode())
        (gradient,) = torch.autograd.grad(inside.sum(), packed, retain_graph=True)
    assert inside.dtype == torch.float32 and torch.equal(inside, plain)
    assert torch.equal(gradient, torch.autograd.grad(plain.sum(), packed)[0])


def test_a_non_contiguous_gradient_is_right(assert_near: Near) -> None:
    shape = SHAPES["tt"]
    packed = torch.randn(shape.numel, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(10, 6, dtype=torch.float64).T
    for strided in (grad, torch.ones(1, dtype=torch.float64).expand(6, 10)):
        pair = (tt_weight(packed, shape.encode()), to_dense(packed, shape))
        assert_near(*(torch.autograd.grad(m, packed, strided)[0] for m in pair))


def test_a_traced_graph_shows_one_marker() -> None:
    # What the passes look for, whichever way it was called.
    shape = SHAPES["tt"]
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    packed = torch.randn(shape.numel)
    for op in (tt_weight, torch.ops.comera.tt_weight, torch.ops.comera.tt_weight.default):
        torch._dynamo.reset()
        seen.clear()
        torch.compile(lambda p, op=op: op(p, shape.encode()), backend=backend, fullgraph=True)(packed)
        assert len(seen) == 1 and seen[0] in MARKERS


def test_a_packed_vector_of_another_length_is_refused() -> None:
    shape = SHAPES["tt"]
    with pytest.raises(ShapeError, match=r"\(62,\), got \(61,\)"):
        tt_weight(torch.zeros(61), shape.encode())


def test_layouts_are_decoded_once() -> None:
    assert decode(SHAPES["ttm"].encode()) is decode(SHAPES["ttm"].encode())
    assert decode(SHAPES["ttm"].encode()) == SHAPES["ttm"]


class Watching(TorchDispatchMode):
    """Sees every operation, as FLOP counters and selective activation checkpointing do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@every_shape
def test_dispatch_modes_may_watch(shape: TTShape) -> None:
    # torch.func inside the op would meet the mode and fail on its wrapped tensors.
    packed = torch.randn(shape.numel, requires_grad=True)
    (expected,) = torch.autograd.grad(tt_weight(packed, shape.encode()).sum(), packed)
    with Watching():
        (gradient,) = torch.autograd.grad(tt_weight(packed, shape.encode()).sum(), packed)
    assert torch.equal(gradient, expected)
