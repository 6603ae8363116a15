"""``comera.autotune(model, batch)``: measure the plans of a model's layers on this device and remember the winners."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from comera_compile import pipeline, torch_private
from comera_compile.calibrate import check_device
from comera_compile.decide import Found
from comera_compile.discover import find_dense_parameters
from comera_compile.errors import ComeraError, OptionError
from comera_compile.memory_policy import keep_freed_memory
from comera_compile.options import Options
from comera_compile.tensorize import convert
from comera_compile.tt.factorize import choose_shape
from comera_compile.tune import Outcome, layers_of, tune_layer
from comera_compile.tuned_plans import Layer

_HEADS = ("layer", "rows", "predicted best", "ms", "measured best", "ms", "gain", "spread", "note")


@dataclass(frozen=True)
class Tuning:
    """What was measured. ``str(tuning)`` is a table; ``outcomes`` holds the same as values, a layer and rows each."""

    outcomes: tuple[Outcome, ...]

    @property
    def stored(self) -> bool:
        """Whether later processes find every measurement: none was spoilt by a busy machine, all could be written."""
        return all(outcome.stored for outcome in self.outcomes)

    def __str__(self) -> str:
        """A table: times are medians of forward and backward; the gain is that of the plan that runs from now on."""
        if not self.outcomes:
            return "no layer of this model has plans to tune: see comera.report(model)"
        table = [_HEADS, *map(_cells, self.outcomes)]
        widths = [max(len(row[k]) for row in table) for k in range(len(_HEADS))]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def _cells(o: Outcome) -> tuple[str, ...]:
    times = [f"{1e3 * seconds:,.3f}" for seconds in (o.predicted_seconds, o.measured_seconds)]
    mode = "" if o.layer.training else " (inference)"
    return (
        f"{o.layer}{mode}",
        f"{o.rows:,}",
        o.predicted.name,
        times[0],
        o.measured.name,
        times[1],
        f"{o.gain:.2f}x",
        f"{o.noise:.0%}",
        o.note,
    )


def autotune(model: nn.Module, *inputs: Any, **options: Any) -> Tuning:
    """Measure the best few plans of each distinct layer at the rows that occur, and store the winners for later runs.

    Every layer takes some seconds. What is measured is forward and backward, or the forward alone under
    ``torch.no_grad()``. A compiled model uses the winners from its next compilation on.

    Args:
        model: any module, compiled or not, packed or not. It is not changed: a copy is called, and weights that are
            still dense are converted in the copy only.
        inputs: what the model is called with.
        options: backend options, for a model that is still dense.

    Returns:
        A line for each layer and number of rows.

    Raises:
        OptionError: an option is unknown or impossible, or ``objective`` is not ``"time"``.
        ComeraError: as the first compiled call would.
    """
    torch_private.check_version()
    settings = Options.parse({**options, "tune": True})
    if not isinstance(model, nn.Module):
        raise OptionError(f"autotune expects an nn.Module, got {type(model).__name__}")
    if settings.keep_memory:  # as in training, which is what is to be timed
        keep_freed_memory()
    return Tuning(tuple(tune_layer(layer, rows) for layer, rows in _layers(model, inputs, settings)))


def tune_sizes(
    sizes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    *,
    rank: int = 32,
    order: int = 3,
    conv1d: bool = False,
    training: bool = True,
    device: str = "cpu",
    threads: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tuning:
    """Tune layers without a model.

    Args:
        sizes: in and out features of each layer.
        rows: numbers of rows to tune each of them at.
        rank, order: as for the backend.
        conv1d: weights are stored as (in, out).
        training: with gradients.
        device, threads, dtype: as for :func:`comera_compile.calibrate.calibrate`.

    Raises:
        OptionError: an argument is impossible.
        ShapeError: a size has no useful modes.
    """
    settings = Options(rank=rank, order=order)
    check_device(device, threads, dtype)
    if any(not 1 <= n for n in rows):
        raise OptionError(f"rows must be positive, got {list(rows)}")
    layers = []
    for inner, outer in sizes:
        stored = (inner, outer) if conv1d else (outer, inner)
        shape = choose_shape(*stored, format="tt", rank=settings.rank, order=settings.order).with_scale(1.0)
        on = device, threads or torch.get_num_threads(), dtype
        layers.append(Layer(shape, "rows" if conv1d else "cols", *on, training))
    keep_freed_memory()
    return Tuning(tuple(tune_layer(layer, n) for layer in dict.fromkeys(layers) for n in dict.fromkeys(rows)))


def _layers(model: nn.Module, inputs: Sequence[Any], options: Options) -> list[tuple[Layer, int]]:
    """The distinct layers of a model, each with the rows at which these inputs meet it."""
    twin = copy.deepcopy(getattr(model, "_orig_mod", model))
    convert([Found(p) for p in twin.parameters()], options, [twin], with_copies=False)
    collect = _Collect(twin, options)
    with torch.random.fork_rng():  # dropout in the copy must not move the random numbers of the model's training
        torch_private.compile_apart(twin, collect)(*inputs)
    return list(collect.layers)


class _Collect:
    """A Dynamo backend that notes the layers of every graph and runs the graphs as they are."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options = model, options
        self.layers: dict[tuple[Layer, int], None] = {}

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> torch_private.Compiled:
        try:
            decisions = convert(find_dense_parameters(graph_module), self.options, [self.model], with_copies=False)
            if any(d.shape is not None for d in decisions):  # of a use that only the graph shows
                raise torch_private.Retrace(restart_reason="comera: weights became tensor trains")
            pipeline.run(graph_module, self._after_pass)
        except ComeraError as error:
            raise torch_private.as_user_error(error) from error
        return graph_module.forward

    def _after_pass(self, name: str, graph_module: fx.GraphModule) -> None:
        if name == "find_tt_weights":
            settings: dict[str, Any] = {"threads": torch.get_num_threads(), "training": torch.is_grad_enabled()}
            self.layers |= dict.fromkeys(layers_of(graph_module, **settings))
