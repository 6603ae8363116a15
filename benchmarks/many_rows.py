"""How often a layer is compiled that meets every number of rows from 1 to 4096 in random order.

``python -m benchmarks.many_rows --threads 2`` trains each model for a step on every number of rows and counts the
graphs that were compiled for it. A call that no compiled graph served would have run eagerly: those are counted as
well, and there must be none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import comera_compile as comera
from benchmarks import output
from benchmarks.six_encoders import Encoder, Sizes

MODULE = "benchmarks.many_rows"
MOST = 6  # compilations of a model, over all numbers of rows
HEAD = ("model", "calls", "compilations", "eager calls", "plans", "s")


@dataclass
class Counting:
    """A Dynamo backend around this package's: counts the graphs it compiles and the calls that they serve."""

    options: dict[str, Any]
    compilations: int = 0
    served: int = 0
    plans: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph. One that is only traced again, now that weights are packed, is not counted."""
        compiled = comera.Backend(**self.options)(graph_module, inputs)
        self.compilations += 1

        def run(*arguments: Any) -> Any:
            self.served += 1
            return compiled(*arguments)

        return run


class Residual(nn.Module):
    """A feed-forward network around which the input goes: two weights of other sizes, hence other crossovers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, width)`` to the same shape."""
        y: Tensor = x + self.narrow(torch.nn.functional.gelu(self.widen(x)))
        return y


class Sequences(nn.Module):
    """The classifier's encoder over one sequence; its rows are the tokens. Three sizes of weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.encoder = Encoder(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, width)`` to the same shape."""
        y: Tensor = self.encoder(x.unsqueeze(0)).squeeze(0)
        return y


MODELS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "linear 768x768": lambda: (nn.Linear(768, 768), 768),
    "linear 768x3072": lambda: (nn.Linear(768, 3072), 768),
    "feed-forward 768x3072": lambda: (Residual(768, 3072), 768),
    "encoder 768x3072": lambda: (Sequences(Sizes()), 768),
}


def orders(largest: int, count: int, seed: int) -> list[int]:
    """``count`` different numbers from 1 to ``largest`` in random order, 1 and ``largest`` among them."""
    generator = torch.Generator().manual_seed(seed)
    inner = (torch.randperm(largest - 2, generator=generator)[: count - 2] + 2).tolist()
    chosen = torch.tensor([1, largest, *inner])
    return [int(n) for n in chosen[torch.randperm(len(chosen), generator=generator)]]


def sweep(
    model: nn.Module, width: int, rows: Sequence[int], *, training: bool = True, dtype: torch.dtype, **options: Any
) -> Counting:
    """Call a model once for each number of rows, with the backward where it trains.

    Returns:
        What was compiled, and how many of the calls it served.
    """
    counting = Counting(options)
    call = torch.compile(model, backend=counting)
    data = torch.randn(max(rows), width, dtype=dtype)
    for count in rows:
        with torch.set_grad_enabled(training):
            y = call(data[:count])
            if training:
                y.square().mean().backward()
        if counting.compilations > len(counting.plans):
            counting.plans.append(plans_of(model))
        model.zero_grad(set_to_none=True)
    return counting


def plans_of(model: nn.Module) -> dict[str, str]:
    """Plan of each weight in the graph that was compiled last."""
    uses = {line.decision.name: line.uses for line in comera.report(model).tensorized}
    return {name: ", ".join(use.plan for use in found) for name, found in uses.items()}


def measure(name: str, rows: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model."""
    torch._dynamo.reset()
    torch.manual_seed(options.seed)
    model, width = MODELS[name]()
    begin = time.perf_counter()
    settings = {"rank": options.rank, "inner": options.inner}
    found = sweep(model, width, rows, training=not options.inference, dtype=torch.float32, **settings)
    return {
        "compilations": found.compilations,
        "eager_calls": len(rows) - found.served,
        "plans": found.plans,
        "seconds": time.perf_counter() - begin,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one ends the process with what is right."""
    p = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rank", type=int, default=32)
    p.add_argument("--largest", type=int, default=4096, help="largest number of rows")
    p.add_argument("--count", type=int, help="how many numbers of rows, drawn at random; default: all of them")
    p.add_argument("--models", type=_models, default=tuple(MODELS), help=f"of {', '.join(MODELS)}")
    p.add_argument("--inference", action="store_true", help="forward alone, without gradients")
    p.add_argument("--inner", default="inductor", help="what lowers the graphs; aot_eager compiles faster")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="file for the result")
    options = p.parse_args(arguments)
    options.count = options.largest if options.count is None else options.count
    if not 3 <= options.count <= options.largest:
        p.error("--count must be from 3 to --largest")
    return options


def _models(text: str) -> tuple[str, ...]:
    asked = tuple(name.strip() for name in text.split(","))
    if set(asked) - set(MODELS):
        raise argparse.ArgumentTypeError(f"models are {', '.join(MODELS)}; got {text!r}")
    return asked


def main(options: argparse.Namespace) -> None:
    """Sweep, print, write."""
    torch.set_num_threads(options.threads)
    rows = orders(options.largest, options.count, options.seed)
    found = {name: measure(name, rows, options) for name in options.models}
    lines = [
        [name, len(rows), f["compilations"], f["eager_calls"], len(set(map(str, f["plans"]))), f["seconds"]]
        for name, f in found.items()
    ]
    print(output.table(HEAD, lines))
    facts = output.conditions(
        dtype="float32",
        rank=options.rank,
        rows=f"{len(rows)} of 1..{options.largest}, seed {options.seed}",
        training=not options.inference,
        inner=options.inner,
    )
    worst = max(f["compilations"] for f in found.values())
    eager = sum(f["eager_calls"] for f in found.values())
    result = {"compilations": {n: f["compilations"] for n, f in found.items()}, "eager_calls": eager, "worst": worst}
    verdict = {"at_most": MOST, "ok": worst <= MOST and eager == 0}
    plans = {name: f["plans"] for name, f in found.items()}
    output.emit(
        {"name": "many_rows", "conditions": facts, **result, **verdict}, raw={"plans": plans}, json_file=options.json
    )


if __name__ == "__main__":
    main(parse())
