"""Saved bytes, predicted when a graph is cut: those of plans and the rest, against what autograd then holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import comera_compile as comera
from comera_compile import pipeline, torch_partition
from comera_compile.ledger import SavedBytes
from comera_compile.passes.count_saved import count_saved
from comera_compile.torch_partition import observed_as_inductor_cuts
from tests import tiny_models as tiny
from tests.packed_modules import linear
from tests.saving_models import OPTIONS, TENSORIZE, Encoder, Gpt, packed, really_saved, words

ROWS = 64


def counted(model: nn.Module, *inputs: Tensor, **options: Any) -> SavedBytes:
    """What ``explain`` predicts for the one graph of a packed model; nothing is lowered."""
    (saved,) = comera.explain(model, *inputs, options=options).saved
    return saved


def loss_of(model: nn.Module, *inputs: Tensor, **options: Any) -> Tensor:
    torch._dynamo.reset()
    loss: Tensor = torch.compile(model, backend="comera", options=OPTIONS | options)(*inputs)
    return loss


@pytest.mark.parametrize("options", [{}, {"saved": "min"}, {"saved_bytes": 250_000}], ids=["auto", "min", "limited"])
@pytest.mark.parametrize("kind", ["encoder", "dropout and checkpoints"])
def test_explain_predicts_what_a_run_saves(kind: str, options: dict[str, Any]) -> None:
    # Of the copy that explain makes, without code; of the model itself when it runs. Both parts have something.
    model = packed(Encoder() if kind == "encoder" else Gpt(dropout=0.4, checkpointed=True))
    ids = words()
    saved = counted(model, ids, **options)
    assert saved.total == saved.planned + saved.rest == really_saved(loss_of(model, ids, **options), model, ids)
    assert saved.planned > 0 and saved.rest > 0
    assert saved.total <= options.get("saved_bytes", saved.total)


def test_a_dynamic_batch_counts_as_it_was_compiled() -> None:
    model, first, second = packed(Gpt()), words(3), words(5)
    call = torch.compile(model, backend="comera", options=OPTIONS, dynamic=True)
    loss = call(first)
    (graph,) = comera.report(model).graphs
    assert graph.saved is not None and graph.saved.total == really_saved(loss, model, first)
    assert graph.saved.total < really_saved(call(second), model, second)  # no new graph, hence no new figure


class Parts(nn.Module):
    """A packed layer of order 1, rank 4, 32 -> 48, then a dense one without bias, 48 -> 24."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.packed = linear(32, 48, order=1)
        self.between = between
        self.dense = nn.Linear(48, 24, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.between(self.packed(x))).sum()


@pytest.mark.parametrize(
    ("between", "rest"),
    [
        # The dense layer's gradient reads y, which is made again from the plan's bond: nothing else is saved.
        (nn.Identity(), 0),
        # It reads what dropout leaves: drawn once, so this and the mask, of a byte each, are saved. No plan made them.
        (nn.Dropout(0.5), ROWS * 48 * (8 + 1)),
    ],
    ids=["nothing between", "dropout between"],
)
def test_by_hand(between: nn.Module, rest: int) -> None:
    # By plans, of 8 bytes each: the bond, 64 rows of 4 padded to 8, and the merged half that y came from, 8 x 48. x
    # wants no gradient, so the other half is not read again.
    # Operations count, not time: no layer of this size would take the detour.
    saved = counted(Parts(between), torch.randn(ROWS, 32, dtype=torch.float64), objective="flops")
    assert saved.rest == rest
    assert saved.planned == 8 * (ROWS * 8 + 8 * 48)
    assert str(saved).startswith(f"{saved.total:,} bytes saved for the backward: {saved.planned:,} made by plans")


def test_without_plans_everything_is_the_rest() -> None:
    # The same model dense: the marks are those of plans, not of linear layers.
    dense = tiny.double(tiny.Mlp())
    call = torch.compile(dense, backend="comera", options=tiny.OPTIONS | {"include": "fc1"})
    x = tiny.rows(ROWS)
    loss = call(x).square().sum()
    (graph,) = comera.report(dense).graphs
    both = counted(dense, x)
    assert graph.saved == both and both.planned > 0
    found: list[SavedBytes] = []

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        cut = observed_as_inductor_cuts(lambda forward, outputs: found.append(count_saved(forward, outputs)))
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda g, _: g, partition_fn=cut)(graph_module, inputs)

    torch.compile(tiny.double(tiny.Mlp()), backend=backend)(x)
    assert found[0].planned == 0 and found[0].rest > 0 and loss.grad_fn is not None


@pytest.mark.parametrize("saved", ["all", "auto"])
def test_explain_counts_the_inner_compilers_cut_too(saved: str) -> None:
    # saved="all" is cut by torch; the parts add up to what that forward graph hands over.
    model, ids = packed(Gpt(F.gelu)), words()
    shown = comera.explain(model, ids, options={"saved": saved})
    cuts: list[int] = []
    cut = observed_as_inductor_cuts(lambda forward, n: cuts.append(torch_partition.saved_bytes(forward, n)))

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        pipeline.run(graph_module)
        return aot_autograd(fw_compiler=lambda g, _: g, partition_fn=cut)(graph_module, inputs)

    torch.compile(model, backend=backend)(ids)
    (found,) = shown.saved
    assert found.planned > 0 and found.rest > 0
    assert (found.total == cuts[0]) is (saved == "all")
    assert f"== saved by graph 1 of 1 ==\n{found}" in str(shown)


def test_without_a_backward_there_is_nothing_to_count() -> None:
    with torch.no_grad():
        assert comera.explain(tiny.double(tiny.Mlp()), tiny.rows(6), options=TENSORIZE).saved == []
