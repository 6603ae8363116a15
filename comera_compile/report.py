"""``comera.report(model)``: what became of every matrix of a model, and what runs for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from comera_compile import ledger
from comera_compile.ledger import Decision, GraphRecord, PlannedUse
from comera_compile.weights import tt_module
from comera_compile.weights.owners import Owner, is_matrix, owner_name, qualified_names


@dataclass(frozen=True)
class Line:
    """One weight: the decision about it and the plans of the newest graph that uses it."""

    decision: Decision
    uses: tuple[PlannedUse, ...]

    def cells(self) -> tuple[str, ...]:
        """Texts of the table's columns."""
        d, shape = self.decision, self.decision.shape
        modes = "" if shape is None else f"{_times(shape.row_modes)} | {_times(shape.col_modes)}"
        ranks = "" if shape is None else ",".join(map(str, shape.ranks[1:-1]))
        kept = "" if d.kept is None else f"{100 * d.kept:.0f}%"
        use = self.uses[0] if self.uses else PlannedUse("", "", None, None)
        plan = use.plan + (f" (+{len(self.uses) - 1} more)" if len(self.uses) > 1 else "")
        flops = "" if use.flops is None else f"{use.flops / 1e6:,.1f}"
        saved = "" if use.saved_bytes is None else f"{use.saved_bytes / 1024:,.0f}"
        form = "dense" if shape is None else shape.format
        size = f"{d.dense_numel:,}" if shape is None else f"{d.dense_numel:,} -> {d.numel:,}"
        dense = "" if self.over_dense is None else f"{self.over_dense:.2g}x"
        return (d.name, form, size, modes, ranks, kept, plan, use.rows, flops, saved, dense, d.reason)

    @property
    def over_dense(self) -> float | None:
        """How many times as fast as a dense weight the plans of all uses are predicted to be; None: no prediction.

        Products of one step alone: forward, and the gradients where they are taken, without the optimizer.
        """
        times = [(use.seconds, use.dense_seconds) for use in self.uses]
        ours, dense = sum(t or 0.0 for t, _ in times), sum(t or 0.0 for _, t in times)
        return dense / ours if ours and all(t is not None for pair in times for t in pair) else None


_HEADS = (
    *("weight", "form", "parameters", "modes", "ranks", "kept", "plan", "rows", "MFLOP", "saved KiB", "vs dense"),
    "why",
)


@dataclass(frozen=True)
class Report:
    """Every matrix of a model. ``str(report)`` is a table; ``lines`` holds the same as values.

    ``graphs`` are the newest compiled graphs that use them, with the bytes that each saves for its backward.
    """

    lines: tuple[Line, ...]
    graphs: tuple[GraphRecord, ...] = ()

    @property
    def better_dense(self) -> tuple[Line, ...]:
        """Tensor-train weights whose products are predicted to take less time with a dense weight."""
        return tuple(line for line in self.tensorized if line.over_dense is not None and line.over_dense < 1)

    @property
    def dense_numel(self) -> int:
        """Elements of all matrices in dense form."""
        return sum(line.decision.dense_numel for line in self.lines)

    @property
    def numel(self) -> int:
        """Elements of all matrices as they are trained now."""
        return sum(line.decision.numel for line in self.lines)

    @property
    def tensorized(self) -> tuple[Line, ...]:
        """The lines of tensor-train weights."""
        return tuple(line for line in self.lines if line.decision.shape is not None)

    def __getitem__(self, name: str) -> Line:
        """The line of one weight by its dotted name."""
        for line in self.lines:
            if line.decision.name == name:
                return line
        raise KeyError(f"{name!r} is not among the matrices: {', '.join(x.decision.name for x in self.lines)}")

    def __str__(self) -> str:
        """A table: MFLOP and saved KiB are of one training step at the rows shown (the hint of a dynamic size).

        "vs dense" is the predicted time of the plain product with a dense weight over that of the plan.
        """
        table = [_HEADS, *(line.cells() for line in self.lines)]
        widths = [max(len(row[k]) for row in table) for k in range(len(_HEADS))]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        ratio = self.dense_numel / max(1, self.numel)
        foot = (
            f"{len(self.tensorized)} of {len(self.lines)} matrices are tensor trains; "
            f"{self.dense_numel:,} parameters before, {self.numel:,} now ({ratio:.1f}x fewer)"
        )
        return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:], foot, *self._advice(), *self._saved()])

    def _advice(self) -> list[str]:
        """A line for each weight that is predicted to be faster dense."""
        return [_better_dense(line) for line in self.better_dense]

    def _saved(self) -> list[str]:
        """A line for each compiled graph."""
        return [f"graph {k + 1}: {_SAVED_ELSEWHERE if g.saved is None else g.saved}" for k, g in enumerate(self.graphs)]


_SAVED_ELSEWHERE = (
    "what it saves for the backward is not known here: it has no backward (yet), comes from the disk cache, or the "
    "inner compiler chooses (saved='all'); comera.explain(model, ...) counts it"
)


def _better_dense(line: Line) -> str:
    name, use = line.decision.name, line.uses[0]
    module = name.rpartition(".")[0] or name
    assert line.over_dense is not None
    faster = f"{1 / line.over_dense:.2g}x faster dense at {use.rows_hint} rows (predicted, without the optimizer)"
    return f"{name}: {faster}: exclude={module!r}, or a lower rank"


def report(model: nn.Module) -> Report:
    """What became of every matrix below ``model``: form and why, modes, ranks, energy kept, sizes, plan, FLOPs, bytes.

    Weights that no compiled call has looked at yet are listed as such. Plans are those of the newest compiled graph.
    """
    known = [ledger.recall(parameter) for parameter in model.parameters()]
    graphs = {id(k.graph): k.graph for k in known if k is not None and k.graph is not None}
    return Report(tuple(_lines(model)), tuple(graphs.values()))


def _lines(model: nn.Module) -> Iterator[Line]:
    names = qualified_names([model])
    seen: set[int] = set()
    for module in model.modules():
        shapes = tt_module.shapes_of(module)
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or not (is_matrix(parameter) or key in shapes):
                continue
            seen.add(id(parameter))
            known = ledger.recall(parameter)
            name = owner_name(Owner(module, key), names)
            if key in shapes and (known is None or known.decision.shape != shapes[key]):
                decision = Decision(name, shapes[key], "copied or loaded in this form", shapes[key].dense_numel)
            elif known is None:
                decision = Decision(name, None, "not looked at yet", parameter.numel())
            else:
                decision = known.decision
            yield Line(decision, tuple(known.uses) if known else ())


def _times(modes: tuple[int, ...]) -> str:
    return "x".join(map(str, modes))
