"""Dropout of the weights of attention between bonds: what is dropped, and that the gradients know it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from comera_compile.codegen.apply_attend import Attend
from comera_compile.codegen.cpu import attend_kernels as kernels
from tests.test_attend_kernels import BARS, Case, draw, reference

SEED = torch.tensor([0x0FED_CBA9_8765_4321])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def factors(case: Case, p: float, seed: Tensor = SEED, dtype: torch.dtype = torch.float64) -> Tensor:
    """What each weight is multiplied with, ``[batch, heads, queries, keys]``.

    Seen where all scores are equal, v has a column a key, and the output projection keeps all heads apart.
    """
    keys, heads = case.tokens[1], case.heads[0]
    unit = torch.eye(keys, dtype=dtype)
    nothing = torch.zeros(1, heads * keys, dtype=dtype)
    hq, hk = (torch.zeros(case.batch, n, 1, dtype=dtype) for n in case.tokens)
    wide: list[Any] = [nothing, None, nothing, None, unit.repeat(1, heads), None]
    operands: Any = (hq, hk, unit.expand(case.batch, -1, -1), *wide, torch.eye(heads * keys, dtype=dtype), None)
    made = kernels.attend(operands, (heads, heads, False, 1.0), p, seed)
    return made.unflatten(2, (heads, keys)).transpose(1, 2) * keys


def run(operands: list[Any], grad: Tensor, case: Case, p: float) -> list[Tensor]:
    given: Any = tuple(operands)
    made = kernels.backward(grad, given, case.settings(), p, SEED)
    return [kernels.attend(given, case.settings(), p, SEED), *(m for m in made if m is not None)]


def truth(operands: list[Any], grad: Tensor, case: Case, p: float) -> list[Tensor]:
    given = [None if o is None else o.detach().double().requires_grad_() for o in operands[:-1]]
    mask = None if operands[-1] is None else operands[-1].double()
    y = reference([*given, mask], case.settings(), factors(case, p))
    return [y, *torch.autograd.grad(y, [g for g in given if g is not None], grad.double())]


def test_weights_are_dropped_with_the_probability_asked_for_and_independently() -> None:
    case, p = Case(batch=3, tokens=(70, 60), heads=(4, 4)), 0.3
    made = factors(case, p)
    assert made.shape == (3, 4, 70, 60)
    torch.testing.assert_close(made.unique(), torch.tensor([0, 1 / (1 - p)], dtype=torch.float64))
    dropped = (made < 0.5).double() - p
    one = (p * (1 - p)) ** 0.5
    assert dropped.mean().abs() <= 5 * one / made.numel() ** 0.5
    # neither heads, entries, queries nor keys repeat each other: the largest of many correlations is below 6.5
    # deviations
    for axes in ((0, 1), (0, 1, 2), (3,)):
        rest = [k for k in range(4) if k not in axes]
        rows = dropped.permute(*axes, *rest).flatten(0, len(axes) - 1).flatten(1)
        correlation = rows @ rows.t() / rows.shape[1] / one**2
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() <= 6.5 / rows.shape[1] ** 0.5, axes


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("mask", ["none", "full"])
def test_gradients_drop_what_the_result_has_dropped(mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = (((50, 50), (4, 2)), ((1, 130), (3, 1)), ((130, 33), (2, 2)))
    for (tokens, heads), p in itertools.product(sizes, (0.1, 0.6)):
        case = Case(tokens=tokens, heads=heads, mask=mask, causal=mask == "none" and tokens[0] == tokens[1])
        operands, grad = draw(case, dtype)
        ours, right = run(operands, grad, case, p), truth(operands, grad, case, p)
        largest = max(r.abs().max() for r in right)
        for made, exact in zip(ours, right, strict=True):
            assert made.shape == exact.shape and made.dtype == dtype
            # what cancels, as the gradient of the bias of k does, has no digits of its own
            assert (made.double() - exact).abs().max() <= 4 * BARS[dtype] * max(exact.abs().max(), largest / 10)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_threads_do_not_change_what_is_dropped(count: int) -> None:
    case = Case(batch=3, tokens=(60, 55), heads=(4, 4))
    torch.set_num_threads(1)
    alone = factors(case, 0.4)
    torch.set_num_threads(count)
    for dtype in BARS:
        assert torch.equal(factors(case, 0.4, dtype=dtype) < 0.5, alone < 0.5)


def test_all_or_nothing() -> None:
    case = Case()
    operands, grad = draw(case)
    assert all(t.abs().max() == 0 for t in run(operands, grad, case, 1.0))
    given: Any = tuple(operands)
    assert torch.equal(kernels.attend(given, case.settings(), 0.0, None), kernels.attend(given, case.settings()))


def test_gradcheck_of_the_function() -> None:
    case = Case(batch=1, tokens=(5, 6), heads=(2, 2), dim=3, bonds=(2, 2, 3, 2))
    operands, _ = draw(case)
    *trained, mask = [None if o is None else o.requires_grad_() for o in operands]
    apply: Any = Attend.apply
    assert torch.autograd.gradcheck(lambda *o: apply(case.settings(), 0.4, SEED, *o, mask), tuple(trained))


def test_operators_describe_themselves_rightly() -> None:
    case = Case(batch=1, tokens=(5, 6), heads=(2, 2), dim=3, bonds=(2, 2, 3, 2))
    operands, grad = draw(case)
    arguments, tests = (*operands, *case.settings(), 0.4, SEED), ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.comera.attend.default, arguments, test_utils=tests)
    torch.library.opcheck(torch.ops.comera.attend_backward.default, (grad, *arguments), test_utils=tests)


def test_what_is_refused() -> None:
    case = Case()
    operands: Any = tuple(draw(case)[0])
    wrong = (-0.1, SEED, "a probability, 0 to 1, got -0.1"), (0.5, None, "needs one int64 seed, got none")
    for p, seed, text in wrong:
        with pytest.raises(ValueError, match=text):
            kernels.attend(operands, case.settings(), p, seed)
