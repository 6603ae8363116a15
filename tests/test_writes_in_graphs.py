"""Compiled code that writes in place: every write happens, and what comes after it sees it. Against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from tests import tiny_models as tiny
from tests.chosen_plans import choose_plans

Step = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """A linear layer, a buffer of its width, a counter, and what is done with them."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.step = step
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def counted(m: Layer, x: Tensor) -> Tensor:
    m.count.add_(1)
    return m.fc(x)


def moving_average(m: Layer, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(x.mean(0))
    return m.fc(x) + m.mean


def copied(m: Layer, x: Tensor) -> Tensor:
    m.mean[:16].copy_(x[0, :16])
    return m.fc(x)


def activated(m: Layer, x: Tensor) -> Tensor:
    h = m.fc(x)
    h.relu_()
    return h


def activated_by_function(m: Layer, x: Tensor) -> Tensor:
    h = m.fc(x)
    F.relu(h, inplace=True)
    return h


def masked(m: Layer, x: Tensor) -> Tensor:
    h = m.fc(x)
    h.masked_fill_(h > 0, 0.5)
    return h


def filled_by_out(m: Layer, x: Tensor) -> Tensor:
    torch.add(x[0], 1, out=m.mean)
    return m.fc(x) + m.mean


def many_at_once(m: Layer, x: Tensor) -> Tensor:
    torch._foreach_add_([m.mean, m.count], 1)
    return m.fc(x)


def changed_input(m: Layer, x: Tensor) -> Tensor:
    h = x * 1
    h.zero_()
    return m.fc(h)


def changed_bias(m: Layer, x: Tensor) -> Tensor:
    m.fc.bias.add_(1)
    return m.fc(x)


def product_into_buffer(m: Layer, x: Tensor) -> Tensor:
    room = x.new_zeros(x.shape[0], 32)
    torch.mm(x, m.fc.weight.t(), out=room)
    return room + 1


def product_into_buffer_with_bias(m: Layer, x: Tensor) -> Tensor:
    room = x.new_zeros(x.shape[0], 32)
    torch.addmm(m.fc.bias, x, m.fc.weight, out=room)
    return room * 2


def changed_between_uses(m: Layer, x: Tensor) -> Tensor:
    y = m.fc(x)
    for p in m.parameters():
        y = y + 0 * p.mul_(2).sum()
    return y + m.fc(x)


def changed_between_uses_unread(m: Layer, x: Tensor) -> Tensor:
    y = m.fc(x)
    for p in m.parameters():
        p.mul_(2)
    return y + m.fc(x)


def of_three_axes(m: Layer, x: Tensor) -> Tensor:
    h = m.fc(x.unflatten(0, (5, 1)))
    h += 1
    h[:, :, :4] = 0.5
    return h.relu_()


def of_three_axes_without_bias(m: Layer, x: Tensor) -> Tensor:
    h = F.linear(x.unflatten(0, (5, 1)), m.fc.weight)
    h += m.fc.bias
    return h.relu_()


def inside_a_checkpoint(m: Layer, x: Tensor) -> Tensor:
    def body(h: Tensor) -> Tensor:
        doubled = m.fc(h)
        doubled.mul_(2)
        return doubled.sin()

    y: Tensor = checkpoint(body, x, use_reentrant=False)
    return y


TRAINABLE = [counted, moving_average, copied, activated, activated_by_function, masked, many_at_once, changed_input]
TRAINABLE += [of_three_axes, of_three_axes_without_bias, inside_a_checkpoint]
WITHOUT_GRADIENTS = [filled_by_out, changed_bias, product_into_buffer, product_into_buffer_with_bias]
WITHOUT_GRADIENTS += [changed_between_uses, changed_between_uses_unread]


def packed(step: Step) -> Layer:
    model = Layer(step).double()
    comera.tensorize(model, **tiny.TENSORIZE)
    assert model.fc.weight.shape == (32, 32) and next(model.parameters()).dim() == 1
    return model


def assert_same(step: Step, *, gradients: bool, options: dict[str, object]) -> None:
    ours = packed(step)
    right = copy.deepcopy(ours)
    call = torch.compile(ours, backend="comera", options=options)
    for _ in range(2):
        x = torch.randn(5, 32, dtype=torch.float64)
        with torch.set_grad_enabled(gradients):
            results = [f(x.clone()) for f in (call, right)]
        torch.testing.assert_close(results[0], results[1])
        if gradients:
            for y in results:
                y.square().sum().backward()
    for (name, a), b in zip(ours.state_dict().items(), right.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    for a, b in zip(ours.parameters(), right.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("step", TRAINABLE + WITHOUT_GRADIENTS)
def test_without_gradients(step: Step) -> None:
    assert_same(step, gradients=False, options=tiny.OPTIONS)


@pytest.mark.parametrize("step", TRAINABLE)
def test_in_training(step: Step) -> None:
    assert_same(step, gradients=True, options=tiny.OPTIONS)


@pytest.mark.parametrize("plan", ["merge both halves", "merge 2 | 1+1", "merge 1+1 | 2", "core by core", "rebuild W"])
@pytest.mark.parametrize("step", [of_three_axes, of_three_axes_without_bias])
def test_the_output_of_every_plan_may_be_written_to(step: Step, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # autograd refuses that for a view made inside of a function of its own
    choose_plans(monkeypatch, plan)
    assert_same(step, gradients=True, options=tiny.OPTIONS)


@pytest.mark.parametrize("objective", ["time", "flops", "bytes"])
def test_a_weight_that_the_graph_writes_to_is_merged_after_the_write(objective: str) -> None:
    # Other objectives choose other plans: those whose merges are shared by all uses are the ones that could be stale.
    for step in (changed_between_uses, changed_between_uses_unread):
        assert_same(step, gradients=False, options=tiny.OPTIONS | {"objective": objective})


@pytest.mark.parametrize("step", [counted, activated])
def test_with_nothing_converted(step: Step) -> None:
    model = Layer(step)
    right, x = copy.deepcopy(model), torch.randn(5, 32)
    call = torch.compile(model, backend="comera", options={"exclude": "*", "inner": "aot_eager"})
    torch.testing.assert_close(call(x), right(x))
    assert model.count == right.count
