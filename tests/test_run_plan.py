"""Every candidate plan against float64 autograd on the rebuilt matrix: results, and gradients of x, cores and bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from comera_compile.codegen.run_plan import apply_operands, merge_cores
from comera_compile.planning.linear_plan import LinearPlan, Side, candidates
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.packing import to_dense
from comera_compile.tt.shape import TTShape

Near = Callable[..., None]
# Largest relative error of a gradient, as agreed for this package.
BARS = {torch.float64: 1e-10, torch.float32: 1e-4}
SIDES: tuple[Side, ...] = ("rows", "cols")
SHAPES = {
    "order 1": TTShape("tt", 6, 10, (6,), (10,), (1, 3, 1), 0.5),
    "order 1, rank 1": TTShape("tt", 6, 10, (6,), (10,), (1, 1, 1), 1.0),
    "order 1, primes padded": TTShape("tt", 7, 11, (8,), (12,), (1, 5, 1), 0.7),
    "order 2, full ranks": choose_shape(12, 20, format="tt", rank=10**6, order=2).with_scale(0.9),
    "order 2, rank 1": choose_shape(12, 20, format="tt", rank=1, order=2).with_scale(1.3),
    "order 2, primes padded": choose_shape(23, 31, format="tt", rank=5, order=2).with_scale(0.8),
    "ragged": TTShape("tt", 12, 15, (2, 3, 2), (15,), (1, 2, 4, 3, 1), 1.1),
    "ragged the other way": TTShape("tt", 6, 30, (6,), (5, 3, 2), (1, 5, 4, 2, 1), 0.6),
    "order 3": TTShape("tt", 24, 30, (4, 3, 2), (2, 3, 5), (1, 3, 6, 7, 5, 3, 1), 0.6),
    "order 3, rows padded": TTShape("tt", 13, 18, (2, 2, 4), (2, 3, 3), (1, 2, 3, 4, 6, 3, 1), 1.2),
    "order 3, columns padded": TTShape("tt", 18, 13, (3, 3, 2), (4, 2, 2), (1, 3, 6, 4, 4, 2, 1), 0.9),
    "order 3, full ranks, bond 18": TTShape("tt", 18, 18, (3, 3, 2), (2, 3, 3), (1, 3, 9, 18, 9, 3, 1), 0.5),
    "order 4": TTShape("tt", 24, 16, (3, 2, 2, 2), (2, 2, 2, 2), (1, 3, 4, 5, 6, 5, 4, 2, 1), 0.7),
    "order 4, a mode of 1": TTShape("tt", 12, 24, (3, 1, 2, 2), (2, 1, 3, 4), (1, 2, 2, 4, 3, 4, 4, 2, 1), 0.8),
}


def run(plan: LinearPlan, x: Tensor, bias: Tensor | None, packed: Tensor, scale: float) -> Tensor:
    operands = merge_cores(plan.encode(), (scale,), packed)
    return apply_operands(plan.encode(), x, bias, *(o[0] for o in operands))


def truth(shape: TTShape, contracts: Side, x: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
    """The same product with the rebuilt matrix, in float64."""
    weight = to_dense(packed.double(), shape)
    y = x.double() @ (weight.T if contracts == "cols" else weight)
    return y if bias is None else y + bias.double()


def widths(shape: TTShape, contracts: Side) -> tuple[int, int]:
    """Columns of x and of y."""
    return (shape.cols, shape.rows) if contracts == "cols" else (shape.rows, shape.cols)


def leaf(*size: int, dtype: torch.dtype, wanted: bool = True) -> Tensor:
    return torch.randn(*size, dtype=dtype).requires_grad_(wanted)


def check(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], dtype: torch.dtype, what: str) -> None:
    for ours, right in zip(actual, expected, strict=True):
        assert (ours is None) == (right is None), what
        if ours is None or right is None:
            continue
        assert ours.shape == right.shape and ours.dtype == dtype, what
        ours, right = ours.detach().double(), right.detach().double()
        error = float((ours - right).norm() / right.norm().clamp_min(1e-30))
        assert error <= BARS[dtype], f"{what}: relative error {error:.2e}"


def compare(shape: TTShape, rows: Sequence[int], dtype: torch.dtype, *, bias: bool = True, multiple: int = 16) -> None:
    """Result and all gradients of every candidate plan of both sides."""
    for contracts in SIDES:
        taken, given = widths(shape, contracts)
        x, packed = leaf(*rows, taken, dtype=dtype), leaf(shape.numel, dtype=dtype)
        offset = leaf(given, dtype=dtype) if bias else None
        leaves = [t for t in (x, packed, offset) if t is not None]
        grad = torch.randn(*rows, given, dtype=dtype)
        right = truth(shape, contracts, x, offset, packed)
        expected = [right, *torch.autograd.grad(right, leaves, grad.double())]
        for plan in candidates(shape, contracts, multiple):
            y = run(plan, x, offset, packed, shape.scale)
            check([y, *torch.autograd.grad(y, leaves, grad)], expected, dtype, f"{plan.name} ({plan.encode()})")


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_plan_gives_the_gradients_of_the_rebuilt_matrix(shape: TTShape, dtype: torch.dtype) -> None:
    compare(shape, (7,), dtype)


@pytest.mark.parametrize("rows", [(1,), (0,), (), (2, 3), (2, 0), (1, 1, 4)])
@pytest.mark.parametrize("name", ["order 2, primes padded", "order 3"])
def test_any_number_of_rows_in_any_number_of_dimensions(name: str, rows: tuple[int, ...]) -> None:
    # One row, none, a vector, and batches of sequences.
    compare(SHAPES[name], rows, torch.float64)


@pytest.mark.parametrize("name", ["order 1", "ragged", "order 3, rows padded"])
def test_without_bias_and_without_padded_bond(name: str) -> None:
    compare(SHAPES[name], (5,), torch.float64, bias=False, multiple=1)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
@pytest.mark.parametrize("name", ["order 2, primes padded", "order 3"])
def test_only_wanted_gradients_are_computed(name: str, wanted: tuple[int, int, int]) -> None:
    # A frozen weight, an input that needs no gradient (the first layer), a frozen bias.
    shape = SHAPES[name]
    for contracts in SIDES:
        taken, given = widths(shape, contracts)
        sizes = ((4, taken), (shape.numel,), (given,))
        x, packed, bias = (leaf(*s, dtype=torch.float64, wanted=bool(w)) for s, w in zip(sizes, wanted, strict=True))
        leaves = [t for t in (x, packed, bias) if t.requires_grad]
        grad = torch.randn(4, given, dtype=torch.float64)
        expected = torch.autograd.grad(truth(shape, contracts, x, bias, packed), leaves, grad)
        for plan in candidates(shape, contracts, 16):
            y = run(plan, x, bias, packed, shape.scale)
            kept = [t for t in y.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
            if wanted == (0, 0, 1):
                assert kept == []  # the gradient of the bias needs nothing of the forward
            check(torch.autograd.grad(y, leaves, grad), expected, torch.float64, plan.name)


def test_large_scales_stay_within_half_precision() -> None:
    # Each core times 100 is in range; one core of a half, 0.1 here, times 100 ** 3 for all of them is not.
    shape = choose_shape(48, 48, format="tt", rank=4, order=3).with_scale(100.0)
    first, *inner, last = (torch.randn(size) for size in shape.core_sizes)
    packed = torch.cat([0.1 * first, *(1e-2 * core for core in inner), 0.1 * last]).half()
    plan = candidates(shape, "cols", 16)[0]
    ours, right = (run(plan, torch.ones(2, 48, dtype=t), None, packed.to(t), 100.0) for t in (torch.half, torch.double))
    assert (ours - right).norm() <= 0.01 * right.norm()


@pytest.mark.parametrize("other", ["x", "weight", "bias"])
def test_operands_of_different_dtypes_are_refused_outside_autocast(other: str) -> None:
    # As F.linear does: a silent cast would hide where precision is lost. Autocast casts all of them.
    shape = SHAPES["order 3"]
    plan = candidates(shape, "cols", 16)[0]
    sizes = {"x": (4, 30), "weight": (shape.numel,), "bias": (plan.shape.rows,)}
    x, packed, bias = (torch.randn(s, dtype=torch.bfloat16 if n == other else torch.float32) for n, s in sizes.items())
    with pytest.raises(RuntimeError, match="same dtype"):
        run(plan, x, bias, packed, shape.scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(plan, x, bias, packed, shape.scale).dtype == torch.bfloat16


def test_nothing_wants_a_gradient() -> None:
    shape = SHAPES["order 3"]
    x, packed = torch.randn(4, 30, dtype=torch.float64), torch.randn(shape.numel, dtype=torch.float64)
    for plan in candidates(shape, "cols", 16):
        y = run(plan, x, None, packed, shape.scale)
        assert not y.requires_grad
        check([y], [truth(shape, "cols", x, None, packed)], torch.float64, plan.name)


@pytest.mark.parametrize("name", ["order 1", "order 2, primes padded", "order 3", "order 3, columns padded"])
def test_layers_merged_together_keep_their_scales_and_gradients(name: str) -> None:
    scales = (0.5, 1.0, 1.7)
    for contracts in SIDES:
        taken, given = widths(SHAPES[name], contracts)
        x = leaf(6, taken, dtype=torch.float64)
        layers = [leaf(SHAPES[name].numel, dtype=torch.float64) for _ in scales]
        shapes = [SHAPES[name].with_scale(scale) for scale in scales]
        grads = [torch.randn(6, given, dtype=torch.float64) for _ in scales]
        right = [truth(s, contracts, x, None, p) for s, p in zip(shapes, layers, strict=True)]
        expected = torch.autograd.grad(right, [x, *layers], grads)
        for plan in candidates(SHAPES[name], contracts, 16):
            stacks = merge_cores(plan.encode(), scales, *layers)
            assert [tuple(s.shape[1:]) for s in stacks] == [
                tuple(plan.operand_sizes[a] for a in t.axes) for t in plan.operands
            ]
            ys = [apply_operands(plan.encode(), x, None, *(s[k] for s in stacks)) for k in range(3)]
            check([*ys, *torch.autograd.grad(ys, [x, *layers], grads)], [*right, *expected], torch.float64, plan.name)


def test_a_layer_that_no_loss_reaches_gets_a_zero_gradient() -> None:
    # Layers merged together share one backward; the unused one must not see its neighbour's gradient.
    shape = SHAPES["order 3"]
    x, used, unused = torch.randn(4, 30), leaf(shape.numel, dtype=torch.float32), leaf(shape.numel, dtype=torch.float32)
    for plan in candidates(shape, "cols", 16):
        stacks = merge_cores(plan.encode(), (1.0, 1.0), used, unused)
        y = apply_operands(plan.encode(), x, None, *(s.unbind()[0] for s in stacks))
        gradients = torch.autograd.grad(y.sum(), [used, unused])
        assert gradients[0].abs().max() > 0 and gradients[1].abs().max() == 0


@pytest.mark.parametrize("contracts", SIDES)
def test_gradcheck(contracts: Side) -> None:
    # Finite differences, which share nothing with the adjoint steps or with to_dense's autograd.
    shape = TTShape("tt", 6, 5, (3, 2), (2, 3), (1, 2, 3, 2, 1), 0.9)
    taken, given = widths(shape, contracts)
    inputs = (
        leaf(3, taken, dtype=torch.float64),
        leaf(given, dtype=torch.float64),
        leaf(shape.numel, dtype=torch.float64),
    )
    for plan in candidates(shape, contracts, 16):
        assert torch.autograd.gradcheck(lambda x, b, p, plan=plan: run(plan, x, b, p, shape.scale), inputs)


def test_strided_inputs_and_gradients() -> None:
    # A transposed activation in, and the stride-0 gradient of a sum or the strided one of a transpose back.
    shape = SHAPES["order 3"]
    packed = leaf(shape.numel, dtype=torch.float64)
    x = torch.randn(30, 8, dtype=torch.float64).T
    right = truth(shape, "cols", x, None, packed)
    for loss in (lambda y: y.sum(), lambda y: (y.T.contiguous() ** 2).sum(), lambda y: y[:, ::2].sum()):
        (expected,) = torch.autograd.grad(loss(right), packed, retain_graph=True)
        for plan in candidates(shape, "cols", 16):
            found = torch.autograd.grad(loss(run(plan, x, None, packed, shape.scale)), packed)
            check(found, [expected], torch.float64, plan.name)


def test_x_is_kept_once_and_no_wide_tensor_besides() -> None:
    # Both halves merged: x itself, h with one bond a row, and the operands; never the 30 or 24 wide result.
    shape = SHAPES["order 3"]
    plan = next(p for p in candidates(shape, "cols", 1) if p.merged)
    x, packed = leaf(50, 30, dtype=torch.float64), leaf(shape.numel, dtype=torch.float64)
    y = run(plan, x, None, packed, shape.scale)
    saved = sorted(tuple(t.shape) for t in y.grad_fn.saved_tensors)  # type: ignore[union-attr]
    assert saved == sorted([(50, 30), (50, 7), (7, 30), (7, 24)])


def test_mixed_dtypes_are_refused_as_in_eager() -> None:
    shape = SHAPES["order 1"]
    plan = candidates(shape, "cols", 16)[0]
    x, packed = torch.randn(2, 10), torch.randn(shape.numel, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="same dtype"):
        run(plan, x, None, packed, 1.0)


def test_autocast_computes_in_its_dtype(assert_near: Near) -> None:
    shape = SHAPES["order 3"]
    x, packed, bias = torch.randn(6, 30), leaf(shape.numel, dtype=torch.float32), torch.randn(24)
    right = truth(shape, "cols", x, bias, packed)
    for plan in candidates(shape, "cols", 16):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(plan, x, bias, packed, shape.scale)
        assert y.dtype == torch.bfloat16
        assert_near(y.detach(), right.detach())
        (gradient,) = torch.autograd.grad(y.float().sum(), packed)
        assert gradient.dtype == torch.float32  # the cores stay what they are
