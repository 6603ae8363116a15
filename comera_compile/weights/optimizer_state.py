"""Optimizer state that an earlier form of a weight left behind: dropped at the next step, with a warning.

AdamW's dense moments would stop ``step()`` with a shape error once their parameter is packed. State that already has
the packed size, as after ``optimizer.load_state_dict`` of a resumed run, is kept.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_log = logging.getLogger("comera_compile")
_hook: list[Any] = []
# Former shapes of each parameter whose data changed shape, and the optimizers that have been looked through since.
_former_shapes: Any = WeakIdKeyDictionary()
_checked: Any = WeakIdKeyDictionary()


def watch(parameter: torch.Tensor, former: torch.Size) -> None:
    """Look through every optimizer that steps with this parameter from now on.

    Args:
        parameter: a parameter whose data is about to change shape.
        former: the shape it has had so far.
    """
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(drop_stale_state))
    _former_shapes[parameter] = {*_former_shapes.get(parameter, ()), former}
    _checked[parameter] = set()


def steps_taken(parameters: Iterable[torch.Tensor]) -> dict[int, int]:
    """The most steps that a living optimizer has taken with each parameter, by ``id(parameter)``.

    From optimizers that count them (Adam and its like) and whose state is of the parameter's shape; others leave no
    trace, or one that cannot be told from a loaded state.
    """
    wanted = {id(p): p for p in parameters}
    steps: dict[int, int] = {}
    # type() instead of isinstance(): some objects answer __class__ with arbitrary code.
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and "state" in o.__dict__]:
        for parameter, state in list(optimizer.state.items()):
            key = id(parameter)
            if key in wanted and _fits(state, wanted[key].shape):
                steps[key] = max(steps.get(key, 0), int(state.get("step", 0)))
    return steps


def _fits(state: Any, shape: torch.Size) -> bool:
    """Whether a parameter's state is made for this shape, and not for its packed form."""
    values = state.values() if isinstance(state, dict) else ()
    shapes = [v.shape for v in values if isinstance(v, torch.Tensor) and v.numel() > 1]
    return bool(shapes) and all(s == shape for s in shapes)


def drop_stale_state(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Remove state whose tensors do not fit a parameter that has changed its shape."""
    stale = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _former_shapes and _is_stale(optimizer, parameter):
                stale.append(parameter)
    for parameter in stale:
        del optimizer.state[parameter]
    if stale:
        _log.warning(
            "comera: dropped the optimizer state of %d weight(s) that had another shape when it was made; "
            "their moments start anew",
            len(stale),
        )


def _is_stale(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """First look: any tensor of another shape. Later looks: only shapes the parameter once had (a reloaded state)."""
    seen: set[int] = _checked[parameter]
    first = id(optimizer) not in seen
    seen.add(id(optimizer))
    state = optimizer.state.get(parameter, {})
    shapes = [v.shape for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    return any(s != parameter.shape and (first or s in _former_shapes[parameter]) for s in shapes)
