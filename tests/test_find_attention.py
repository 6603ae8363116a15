"""Attention between linear layers: which blocks run from bond to bond, which are left alone, that both are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import comera_compile as comera
from benchmarks.six_encoders import Encoder, Sizes
from comera_compile import pipeline
from comera_compile.codegen import attention_block
from comera_compile.codegen.apply_bridge import apply_bridge
from comera_compile.codegen.attention_block import apply_attention
from comera_compile.codegen.cpu import attend_kernels
from comera_compile.codegen.lower_plans import rebuild_dense
from comera_compile.codegen.run_plan import apply_operands
from comera_compile.passes.plan_attention import ATTENTION
from comera_compile.planning.attention_plan import pays_off_between_bonds
from comera_compile.planning.choose import RowRange
from comera_compile.planning.linear_plan import LinearPlan, candidates

WIDTH, HEADS, DIM, BATCH, TOKENS = 32, 4, 8, 2, 6
OPTIONS: dict[str, Any] = {"rank": 4, "init": "random", "min_elements": 0, "inner": "aot_eager"}
Forward = Callable[["Block", Tensor], Tensor]
attend = F.scaled_dot_product_attention


class Block(nn.Module):
    """The layers of one attention block in all their usual forms, and what is done with them."""

    def __init__(self, between: Forward, *, bias: bool = True) -> None:
        super().__init__()
        self.between = between
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.joint, self.pair = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.few, self.fewer = (nn.Linear(WIDTH, WIDTH // 2, bias=bias) for _ in range(2))
        self.broad, self.broad_out = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.narrow_out = nn.Linear(WIDTH // 2, WIDTH, bias=bias)
        self.mask = nn.Parameter(torch.randn(TOKENS, TOKENS))
        self.calls = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [heads(layer(x)) for layer in (self.query, self.key, self.value)]


def heads(wide: Tensor, count: int = HEADS) -> Tensor:
    """``[batch, tokens, columns]`` to ``[batch, heads, tokens, dim]``."""
    batch, tokens, columns = wide.shape
    return wide.view(batch, tokens, count, columns // count).transpose(1, 2)


def side_by_side(mixed: Tensor) -> Tensor:
    return mixed.transpose(1, 2).flatten(2)


def plain(m: Block, x: Tensor, **settings: Any) -> Tensor:
    batch, tokens, width = x.shape
    return m.out(attend(*m.parts(x), **settings).transpose(1, 2).reshape(batch, tokens, width))


def by_permute(m: Block, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).permute(0, 2, 1, 3) for layer in (m.query, m.key, m.value))
    return m.out(attend(q, k, v).permute(0, 2, 1, 3).contiguous().view(BATCH, TOKENS, WIDTH))


def as_transformers_do(m: Block, x: Tensor) -> Tensor:
    q, k, v = (layer(x).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for layer in (m.query, m.key, m.value))
    mixed = attend(q, k, v)
    mixed = mixed.reshape(mixed.shape[0], -1, x.shape[1], DIM).transpose(1, 2).contiguous()
    return m.out(mixed.reshape(*x.shape[:-1], -1).contiguous())


def of_two_axes(m: Block, x: Tensor) -> Tensor:
    def layer(of: nn.Linear, x: Tensor) -> Tensor:
        return torch.addmm(of.bias, x.view(-1, x.shape[-1]), of.weight.t())

    q, k, v = layer(m.joint, x).view(*x.shape[:-1], 3 * WIDTH).split(WIDTH, dim=2)
    mixed = side_by_side(attend(heads(q), heads(k), heads(v), is_causal=True))
    return (layer(m.out, mixed) + x.view(-1, WIDTH)).view(x.shape)


def grouped(m: Block, x: Tensor) -> Tensor:
    k, v = heads(m.few(x), 2), heads(m.fewer(x), 2)
    return m.out(side_by_side(attend(heads(m.query(x)), k, v, enable_gqa=True)))


def across(m: Block, x: Tensor) -> Tensor:
    memory = x[:, :4].cos()
    k, v = heads(m.key(memory)), heads(m.value(memory))
    return m.out(side_by_side(attend(heads(m.query(x)), k, v)))


def joint(m: Block, x: Tensor) -> Tensor:
    q, k, v = (heads(t) for t in m.joint(x).chunk(3, dim=-1))
    return m.out(side_by_side(attend(q, k, v, is_causal=True)))


def pair(m: Block, x: Tensor) -> Tensor:
    v, k = m.pair(x).split([WIDTH, WIDTH], dim=-1)
    return m.out(side_by_side(attend(heads(m.query(x)), heads(k), heads(v))))


def lower_left(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def closed(x: Tensor) -> Tensor:
    """A mask of numbers for each head of which one query sees nothing."""
    mask = x.detach()[:, :1, None, :TOKENS] * torch.arange(HEADS * TOKENS).view(1, HEADS, TOKENS, 1)
    return mask.index_fill(2, torch.tensor([2]), -torch.inf)


TAKEN: dict[str, Forward] = {
    "plain": plain,
    "causal": lambda m, x: plain(m, x, is_causal=True),
    "scaled": lambda m, x: plain(m, x, scale=0.7),
    "dropout that never drops": lambda m, x: plain(m, x, dropout_p=0.0),
    "residual": lambda m, x: x + plain(m, x),
    "by permute": by_permute,
    "as transformers do": as_transformers_do,
    "layers of two axes": of_two_axes,
    "grouped queries": grouped,
    "keys of other tokens": across,
    "one projection": joint,
    "keys and values of one projection": pair,
    "keys are the values": lambda m, x: plain_of(m, heads(m.query(x)), *[heads(m.key(x))] * 2),
    "a mask of truth values": lambda m, x: plain(m, x, attn_mask=lower_left(x)),
    "a mask of numbers": lambda m, x: plain(m, x, attn_mask=closed(x)),
    "a mask of keys": lambda m, x: plain(m, x, attn_mask=(x.detach()[:, :, :1] > 0).transpose(1, 2)[:, None]),
}


def written(m: Block, x: Tensor) -> Tensor:
    q = heads(m.query(x))
    m.calls.add_(1.0)
    return m.out(side_by_side(attend(q, heads(m.key(x)), heads(m.value(x))))) * m.calls


def without_gradient(m: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        q = heads(m.query(x))
    return m.out(side_by_side(attend(q, heads(m.key(x)), heads(m.value(x)))))


def seen_elsewhere(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.parts(x)
    return plain_of(m, q, k, v) + v.sum()


def plain_of(m: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.out(side_by_side(attend(q, k, v)))


def between_bonds_of_joint(m: Block, x: Tensor) -> Tensor:
    """The output projection is itself followed by a function and another layer."""
    return m.broad(side_by_side(attend(*m.parts(x))))


def mixed_seen(m: Block, x: Tensor) -> Tensor:
    mixed = attend(*m.parts(x))
    return m.out(side_by_side(mixed)) + mixed.sum()


def wide_values(m: Block, x: Tensor) -> Tensor:
    q, k, _ = m.parts(x)
    return m.broad_out(side_by_side(attend(q, k, heads(m.broad(x)))))


def one_part_seen(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.joint(x).chunk(3, dim=-1)
    return plain_of(m, heads(q), heads(k), heads(v)) + v


LEFT: dict[str, Forward] = {
    "q is read twice": lambda m, x: plain_of(m, heads(q := m.query(x)), heads(m.key(x)), heads(m.value(x))) + q,
    "heads are read twice": seen_elsewhere,
    "one part of a projection is read twice": one_part_seen,
    "the mixed values are read twice": mixed_seen,
    "something is written to in between": written,
    "gradients are off for the first": without_gradient,
    "a mask that is trained": lambda m, x: plain(m, x, attn_mask=m.mask),
    "something is done with q": lambda m, x: plain_of(m, 0.5 * (p := m.parts(x))[0], *p[1:]),
    "something is done with the mixed values": lambda m, x: m.out(side_by_side(attend(*m.parts(x)).tanh())),
    "heads are not swapped back": lambda m, x: m.out(attend(*m.parts(x)).reshape(x.shape)),
    "heads are not swapped at all": lambda m, x: m.out(
        attend(*(layer(x).view(BATCH, HEADS, TOKENS, DIM) for layer in (m.query, m.key, m.value))).reshape(x.shape)
    ),
    "heads are shared out once more": lambda m, x: m.narrow_out(side_by_side(attend(*m.parts(x))).view(BATCH, -1, 16)),
    "half of the columns are tokens": lambda m, x: m.out(
        side_by_side(attend(*[m.broad(x).view(BATCH, -1, HEADS, DIM).transpose(1, 2)] * 3))
    ),
    "heads are swapped after they were mixed up": lambda m, x: m.out(
        attend(*m.parts(x)).reshape(BATCH, HEADS, DIM, TOKENS).transpose(1, 2).reshape(x.shape)
    ),
    "swapped twice": lambda m, x: plain_of(m, (p := m.parts(x))[0].transpose(1, 2).transpose(2, 1), *p[1:]),
    "slices of a projection": lambda m, x: plain_of(
        m, *(heads(m.joint(x)[..., k : k + WIDTH]) for k in (0, WIDTH, 2 * WIDTH))
    ),
    "a projection by its parts": lambda m, x: plain_of(
        m, *(heads(t) for t in m.joint(x).unflatten(-1, (3, WIDTH)).unbind(-2))
    ),
    "three tokens": lambda m, x: plain(m, x[:, :3]),
    "values of another width": wide_values,
    "heads of keys are broadcast": lambda m, x: plain_of(
        m, heads(m.query(x)), *(heads(f(x), 2)[:, :1].expand(-1, HEADS, -1, -1) for f in (m.few, m.fewer))
    ),
    "narrow heads": lambda m, x: m.out(
        side_by_side(attend(*(heads(f(x), 2 * HEADS) for f in (m.query, m.key, m.value))))
    ),
    "tokens in front": lambda m, x: m.out(
        attend(*(f(x).view(BATCH, TOKENS * HEADS, DIM).transpose(0, 1)[None] for f in (m.query, m.key, m.value)))
        .squeeze(0)
        .transpose(0, 1)
        .reshape(x.shape)
    ),
    "the projection begins a bridge": lambda m, x: m.broad_out(F.gelu(between_bonds_of_joint(m, x))),
}


@dataclass
class Outcome:
    """Output and gradients compiled, the same in eager mode with the same cores, and blocks in the lowered graph."""

    ours: list[Tensor]
    right: list[Tensor]
    found: int
    report: comera.Report


@pytest.fixture(autouse=True)
def _merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves are merged whole, whatever such small layers would rather have."""

    def merged(shape: object, contracts: object, *_: object) -> tuple[RowRange, ...]:
        plans: list[LinearPlan] = candidates(shape, contracts, 8)  # type: ignore[arg-type]
        return (RowRange(None, next(p for p in plans if p.merged)),)

    monkeypatch.setattr("comera_compile.passes.plan_contractions.plans_by_rows", merged)
    torch._dynamo.reset()


@contextmanager
def lowered() -> Iterator[list[fx.GraphModule]]:
    """The graphs that come out of the last pass."""
    graphs: list[fx.GraphModule] = []
    lower = pipeline.lower_plans

    def watch(graph: fx.GraphModule) -> fx.GraphModule:
        graphs.append(lower(graph))
        return graphs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "lower_plans", watch)
        yield graphs


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


def test_dropout_is_left_alone() -> None:
    # Its random numbers are torch's: only that it is there can be compared.
    with lowered() as graphs:
        model = comera.tensorize(Block(lambda m, x: plain(m, x, dropout_p=0.5)).double(), rank=4, min_elements=0)
        torch.compile(model, backend=comera.Backend(**OPTIONS))(torch.randn(BATCH, TOKENS, WIDTH).double())
    assert graphs and blocks(graphs) == 0
    assert sum(n.target in ATTENTION for graph in graphs for n in graph.graph.nodes) == 1


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_half_precision_is_left_alone(kind: str) -> None:
    dtype = torch.float32 if kind == "autocast" else torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        found = run(plain, dtype=dtype)
    assert found.found == 0
    assert_same(found, 0.1)


def test_halves_that_are_not_merged_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def core_by_core(shape: object, contracts: object, *_: object) -> tuple[RowRange, ...]:
        plans: list[LinearPlan] = candidates(shape, contracts, 8)  # type: ignore[arg-type]
        return (RowRange(None, next(p for p in plans if p.name == "core by core")),)

    monkeypatch.setattr("comera_compile.passes.plan_contractions.plans_by_rows", core_by_core)
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
