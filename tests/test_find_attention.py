"""Attention between linear layers: which blocks run from bond to bond, which are left alone, that both are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from benchmarks.six_encoders import Encoder, Sizes
from comera_compile.codegen import attention_block
from comera_compile.codegen.apply_bridge import apply_bridge
from comera_compile.codegen.attention_block import apply_attention
from comera_compile.codegen.cpu import attend_kernels
from comera_compile.codegen.lower_plans import rebuild_dense
from comera_compile.codegen.run_plan import apply_operands
from comera_compile.planning.attention_plan import pays_off_between_bonds
from tests.attention_forms import BATCH, HEADS, LEFT, TAKEN, TOKENS, WIDTH, Block, Forward, plain, seen_elsewhere
from tests.chosen_plans import choose_plans, lowered

OPTIONS: dict[str, Any] = {"rank": 4, "init": "random", "min_elements": 0, "inner": "aot_eager"}


@dataclass
class Outcome:
    """Output and gradients compiled, the same in eager mode with the same cores, and blocks in the lowered graph."""

    ours: list[Tensor]
    right: list[Tensor]
    found: int
    report: comera.Report


@pytest.fixture(autouse=True)
def _merged(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_plans(monkeypatch, "merge both halves")


def blocks(graphs: Sequence[fx.GraphModule]) -> int:
    return sum(n.target is apply_attention for graph in graphs for n in graph.graph.nodes)


def run(
    forward: Forward,
    *,
    bias: bool = True,
    frozen: Sequence[str] = (),
    dtype: torch.dtype = torch.float64,
    tokens: int = TOKENS,
    **options: Any,
) -> Outcome:
    torch.manual_seed(0)
    model, x = Block(forward, bias=bias).to(dtype), torch.randn(BATCH, tokens, WIDTH, dtype=dtype)
    comera.tensorize(model, rank=4, init="random", min_elements=0, exclude=("mask",))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with lowered() as graphs:
        call = torch.compile(model, backend=comera.Backend(**OPTIONS | {"exclude": ("mask",)} | options))
        sides = [step(call, model, x), step(model, model, x)]
    # what is left alone keeps the plans of its layers
    assert not any(n.target is rebuild_dense for graph in graphs for n in graph.graph.nodes)
    return Outcome(sides[0], sides[1], blocks(graphs), comera.report(model))


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients under a loss that weighs every entry differently."""
    model.zero_grad(set_to_none=True)
    model.get_buffer("calls").zero_()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    # a weight that is merged beside others has a gradient of zeros where eager code has none
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (leaf, *model.parameters())]
    return [y.detach(), *grads]


def assert_same(found: Outcome, bar: float = 1e-11) -> None:
    assert len(found.ours) == len(found.right)
    # the gradient of a key's bias is zero but for rounding: it moves all scores of a query alike
    largest = max(float(b.abs().max()) for b in found.right)
    for a, b in zip(found.ours, found.right, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= bar * max(float(b.abs().max()), 1e-2 * largest)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_known_blocks_run_from_bond_to_bond(name: str, bias: bool) -> None:
    found = run(TAKEN[name], bias=bias or name == "layers of two axes")
    assert found.found == 1
    assert_same(found)


@pytest.mark.parametrize("name", LEFT)
def test_other_blocks_are_left_alone(name: str) -> None:
    found = run(LEFT[name])
    assert found.found == 0
    assert_same(found)


def test_with_dropout_it_runs_from_bond_to_bond() -> None:
    torch.manual_seed(0)
    model = Block(lambda m, x: plain(m, x, dropout_p=0.5)).double()
    comera.tensorize(model, rank=4, init="random", min_elements=0)
    x = torch.randn(BATCH, TOKENS, WIDTH).double()
    with lowered() as graphs:
        call = torch.compile(model, backend=comera.Backend(**OPTIONS))
        many = torch.stack([call(x).detach() for _ in range(400)])
    assert blocks(graphs) == 1
    assert "through attention and dropout" in str(comera.report(model))
    # Other elements than torch's, so means are compared: within 5 of their deviations of what nothing dropped gives.
    right = plain(model, x).detach()
    assert ((many.mean(0) - right).abs() <= 5 * many.std(0) / 400**0.5).all() and not torch.equal(many[0], many[1])


def test_a_checkpoint_drops_the_same_again() -> None:
    model = Block(lambda m, x: plain(m, x, dropout_p=0.3)).double()
    comera.tensorize(model, rank=4, init="random", min_elements=0)
    x, made = torch.randn(BATCH, TOKENS, WIDTH).double(), []
    call: Any = torch.compile(model, backend=comera.Backend(**OPTIONS))
    for through in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        y = checkpoint(call, x, use_reentrant=False) if through else call(x)
        y.square().sum().backward()
        made.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(made[0]) > 4 and all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_without_kernels_torch_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_kernels, "available", lambda *_: False)
    model = Block(lambda m, x: plain(m, x, dropout_p=0.5)).double()
    comera.tensorize(model, rank=4, init="random", min_elements=0)
    x = torch.randn(BATCH, TOKENS, WIDTH).double()
    results = []
    for call in (torch.compile(model, backend=comera.Backend(**OPTIONS)), model):
        torch.manual_seed(3)
        results.append(call(x))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_half_precision_is_left_alone(kind: str) -> None:
    dtype = torch.float32 if kind == "autocast" else torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        found = run(plain, dtype=dtype)
    assert found.found == 0
    assert_same(found, 0.1)


def test_halves_that_are_not_merged_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_plans(monkeypatch, "core by core")
    found = run(plain)
    assert found.found == 0
    assert_same(found)


@pytest.mark.parametrize("name", ["plain", "causal", "grouped queries", "one projection", "a mask of truth values"])
@pytest.mark.parametrize("why", ["a half is frozen", "no compiler"])
def test_without_operators_the_same_call_runs_one_after_the_other(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no compiler":
        monkeypatch.setattr(attend_kernels, "_library", lambda dtype: None)
    frozen = ("query.weight", "joint.weight") if why == "a half is frozen" else ()
    calls: list[str] = []
    for side in ("_by_kernels", "_one_by_one"):
        real = getattr(attention_block, side)
        monkeypatch.setattr(attention_block, side, lambda *a, s=side, r=real: calls.append(s) or r(*a))
    found = run(TAKEN[name], frozen=frozen)
    assert found.found == 1 and set(calls) == {"_one_by_one"}
    assert_same(found)


@pytest.mark.parametrize("causal", [False, True])
def test_many_tokens(causal: bool) -> None:
    # more than one block of queries and than one range of keys
    found = run(lambda m, x: plain(m, x, is_causal=causal), tokens=400)
    assert found.found == 1
    assert_same(found)


def test_with_inductor() -> None:
    for name in ("plain", "one projection"):
        torch._dynamo.reset()
        found = run(TAKEN[name], inner="inductor")
        assert found.found == 1
        assert_same(found)


def test_one_graph_for_all_sizes() -> None:
    torch.manual_seed(0)
    model = comera.tensorize(Block(lambda m, x: plain(m, x, is_causal=True)).double(), rank=4, min_elements=0)
    with lowered() as graphs:
        call = torch.compile(model, backend=comera.Backend(**OPTIONS), dynamic=True)
        for batch, tokens in ((2, 6), (3, 50), (4, 9)):
            x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64)
            assert_same(Outcome(step(call, model, x), step(model, model, x), 0, comera.report(model)))
    assert len(graphs) == blocks(graphs) == 1


def test_the_report_says_so() -> None:
    lines = {line.decision.name: line.uses[0].plan for line in run(plain).report.lines if line.uses}
    for name in ("query", "key", "value"):
        assert lines[f"{name}.weight"] == "merge both halves, its output never stored"
    assert lines["out.weight"] == "merge both halves, from bond to bond through attention"
    torch._dynamo.reset()
    left = {line.decision.name: line.uses[0].plan for line in run(seen_elsewhere).report.lines if line.uses}
    assert {left[f"{name}.weight"] for name in ("query", "key", "value", "out")} == {"merge both halves"}


@pytest.mark.parametrize("name", ["plain", "one projection", "a mask of truth values"])
def test_nothing_wider_than_a_bond_is_saved(name: str) -> None:
    tokens = TOKENS if "mask" in name else 90
    model = comera.tensorize(Block(TAKEN[name]).double(), rank=4, min_elements=0)
    x = torch.randn(BATCH, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    y = torch.compile(model, backend=comera.Backend(**OPTIONS | {"saved": "all"}))(x)
    known = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    assert y.grad_fn is not None
    saved = [t for t in y.grad_fn.saved_tensors if t.untyped_storage().data_ptr() not in known]
    of_rows = [t for t in saved if BATCH * tokens in t.shape or tokens in t.shape]
    # bonds of q, k and v side by side, that of the output, and the mask
    bond = 8
    assert of_rows and all(t.shape[-1] <= 3 * bond or t.shape[-2:] == (tokens, tokens) for t in of_rows)
    assert sum(t.shape[-1] == tokens for t in of_rows) == ("mask" in name)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in of_rows if tokens != t.shape[-1]}
    bonds = 2 if name == "one projection" else 4
    assert sum(storages.values()) == 8 * BATCH * tokens * bonds * bond


def test_where_it_pays_off() -> None:
    # Products of queries with keys are as wide as a bond, otherwise as a head. A single token has next to none of them.
    assert pays_off_between_bonds(128, 128, 32, 64) and pays_off_between_bonds(4, 9000, 64, 64)
    assert not pays_off_between_bonds(128, 128, 65, 64) and not pays_off_between_bonds(128, 128, 32, 16)
    assert not pays_off_between_bonds(1, 128, 32, 64) and not pays_off_between_bonds(128, 3, 32, 64)
    assert pays_off_between_bonds(object(), object(), 32, 64)


def test_blocks_and_bridges_take_turns() -> None:
    # The encoder of the benchmarks: everything from bond to bond but norms and sums.
    torch.manual_seed(0)
    model = Encoder(Sizes(width=WIDTH, hidden=64, heads=HEADS)).double()
    comera.tensorize(model, rank=4, min_elements=0)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    with lowered() as graphs:
        y = torch.compile(model, backend=comera.Backend(**OPTIONS))(x)
    torch.testing.assert_close(y, model(x), rtol=1e-11, atol=1e-11)
    called = [n.target for n in graphs[0].graph.nodes]
    assert (called.count(apply_attention), called.count(apply_bridge), called.count(apply_operands)) == (1, 1, 0)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_models_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    if kind == "gpt2":
        settings = transformers.GPT2Config(vocab_size=50, n_embd=WIDTH, n_layer=2, n_head=HEADS, **quiet)
        model = transformers.GPT2Model(settings)
    else:
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64}
        model = transformers.BertModel(
            transformers.BertConfig(vocab_size=50, **sizes, **quiet), add_pooling_layer=False
        )
    comera.tensorize(model.double(), rank=4, min_elements=1000)
    # kept keys and values are read by whoever gets them
    flags = {"use_cache": False} if kind == "gpt2" else {}
    ids = torch.randint(0, 50, (BATCH, TOKENS))
    results = []
    with lowered() as graphs:
        for call in (torch.compile(model, backend=comera.Backend(**OPTIONS | {"min_elements": 1000})), model):
            model.zero_grad(set_to_none=True)
            y = call(input_ids=ids, **flags).last_hidden_state
            y.backward(torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape))
            results.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert blocks(graphs) == 2
    assert_same(Outcome(*results, 2, comera.report(model)))
