"""Whether an autograd graph that is still alive uses a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from comera_compile import torch_private


def test_has_live_graph_follows_the_graph() -> None:
    # False before, True as long as anything of the graph is alive, False again after; asking changes nothing.
    parameter = nn.Parameter(torch.randn(3, 2))
    assert [torch_private.has_live_graph(parameter) for _ in range(2)] == [False, False]
    output = (parameter * 2).sum()
    assert [torch_private.has_live_graph(parameter) for _ in range(2)] == [True, True]
    output.backward()  # frees what was saved, but the nodes live as long as the output
    assert torch_private.has_live_graph(parameter)
    del output
    assert not torch_private.has_live_graph(parameter) and parameter.grad is not None


def test_has_live_graph_of_an_accumulator() -> None:
    # DDP takes hold of each parameter's accumulator in its constructor, and of the dense shape with it.
    parameter = nn.Parameter(torch.randn(3, 2))
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    assert torch_private.has_live_graph(parameter)
    del accumulator
    assert not torch_private.has_live_graph(parameter)


def test_has_live_graph_of_what_cannot_have_one() -> None:
    # Frozen parameters, computed tensors, a copy, and hooks that wait for the next backward.
    frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    parameter = nn.Parameter(torch.randn(2))
    computed = parameter * 2
    assert not torch_private.has_live_graph(frozen) and not torch_private.has_live_graph(computed)
    hooked = nn.Parameter(torch.randn(2))
    hooked.register_hook(lambda grad: grad)
    hooked.register_post_accumulate_grad_hook(lambda p: None)
    assert not torch_private.has_live_graph(hooked)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_has_live_graph_in_every_grad_mode(guard: Callable[[], Any]) -> None:
    # The first call may be an evaluation.
    parameter = nn.Parameter(torch.randn(2))
    output = parameter.exp()
    with guard():
        assert torch_private.has_live_graph(parameter)
        del output
        assert not torch_private.has_live_graph(parameter)
