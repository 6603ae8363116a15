"""Give a Parameter other data in place: of another shape, in another storage, the same object."""

from __future__ import annotations

import torch
from torch import nn

from comera_compile.weights import optimizer_state


def replace_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Free the parameter's storage and its gradient; optimizers that hold state of the former shape will drop it."""
    optimizer_state.watch(parameter, parameter.shape)
    # The first call may run under inference_mode; its tensors could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        parameter.grad = None
        parameter.data = data.detach().clone(memory_format=torch.contiguous_format)
