"""Every situation in which a user may call the compiled model: results, gradients and the number of compilations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import comera_compile as comera
from tests import tiny_models as tiny

Near = Callable[..., None]


def compiled(model: nn.Module, **settings: object) -> Callable[..., Tensor]:
    """The one-line call; ``settings`` go to ``torch.compile``."""
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS, **settings)
    return call


def test_training_steps_equal_eager(assert_near: Near) -> None:
    # Eight steps of AdamW: an error in any gradient would add up over them.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(6)
    call(x)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for step in range(8):
        losses = [tiny.outcome(f, m, x + step)["loss"] for f, m in ((call, model), (twin, twin))]
        assert_near(*losses, 100)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(ours, theirs, 1e4)  # Adam divides by the root of tiny second moments, which magnifies rounding


def test_the_first_call_converts_and_trains(assert_near: Near) -> None:
    # The call that converts already returns a result with a graph: no user runs a model twice for one step.
    model = tiny.double(tiny.Mlp())
    parameters = list(model.parameters())
    first = tiny.outcome(compiled(model), model, x := tiny.rows(5))
    assert tiny.packed_names(model) == ["fc1.weight", "fc2.weight"]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    twin = copy.deepcopy(model)
    tiny.assert_same(first, tiny.outcome(twin, twin, x), assert_near)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trained", [True, False])
def test_a_first_call_without_gradients_does_not_spoil_training(
    guard: Callable[[], object], trained: bool, assert_near: Near
) -> None:
    # Cores made under inference_mode would be inference tensors, which can never be trained.
    model = tiny.double(tiny.Mlp()).train(trained)
    call, x = compiled(model), tiny.rows(4)
    with guard():  # type: ignore[attr-defined]
        first = call(x)
    assert not any(p.is_inference() for p in model.parameters())
    assert_near(first.clone(), copy.deepcopy(model)(x).detach())
    model.train()
    tiny.assert_as_eager(call, model, [x], assert_near)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model._modules["fc1"]._parameters["weight"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, model._modules["fc1"]._parameters["weight"])


def test_eval_after_training_and_back(assert_near: Near) -> None:
    # Mode switches between epochs: each form is compiled once, then reused.
    count = tiny.Counter()
    model = tiny.double(tiny.Mlp())
    call, x = torch.compile(model, backend="comera", options=count.options), tiny.rows(4)
    call(x)
    for _ in range(3):
        model.train()
        tiny.assert_as_eager(call, model, [x], assert_near)
        model.eval()
        with torch.no_grad():
            assert_near(call(x), copy.deepcopy(model)(x))
    assert count.count == 2


def test_batch_sizes_compile_a_bounded_number_of_graphs(assert_near: Near) -> None:
    # Size 1 is its own graph (torch specialises it), the next size another, and the third makes rows symbolic. After
    # that only a crossing of a plan's range of rows may compile again.
    count = tiny.Counter()
    model = tiny.double(tiny.Mlp())
    call = torch.compile(model, backend="comera", options=count.options)
    for batch in (1, 8, 3, 5, 7, 9, 8, 1, 3):
        call(tiny.rows(batch))
        tiny.assert_as_eager(call, model, [tiny.rows(batch)], assert_near)
    assert count.count <= 4


def test_dynamic_from_the_start(assert_near: Near) -> None:
    # dynamic=True: sizes are symbolic in the graph that converts, too. No norm: torch traces its eps anew.
    count = tiny.Counter()
    model = tiny.double(tiny.Twice())
    call = torch.compile(model, backend="comera", options=count.options, dynamic=True)
    for batch in (6, 3, 5, 9):
        call(tiny.rows(batch))
        tiny.assert_as_eager(call, model, [tiny.rows(batch)], assert_near)
    assert count.count <= 2


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 1), (2, 3, 2), (0,)])
def test_leading_dimensions(shape: tuple[int, ...], assert_near: Near) -> None:
    # No leading dimension, sizes of 1, several dimensions, and an empty batch.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(*shape)
    assert call(x).shape == x.shape
    twin = copy.deepcopy(model)
    assert_near(call(x), twin(x))
    if x.numel():
        tiny.assert_as_eager(call, model, [x], assert_near)


def test_the_input_gradient_is_right(assert_near: Near) -> None:
    # Adapters and adversarial training ask for it; the planner makes it from the same steps as the core gradients.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(4).requires_grad_()
    call(x)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.autograd.grad(f(x).pow(3).sum(), x)[0] for f in (call, twin))
    assert_near(ours, theirs)


def test_a_graph_break_keeps_both_halves(assert_near: Near) -> None:
    # Each half is a frame of its own for Dynamo; both must be converted and both must run our plans, both ways.
    count = tiny.Counter()
    model = tiny.double(tiny.Broken())
    call, x = torch.compile(model, backend="comera", options=count.options), tiny.rows(5)
    call(x)
    tiny.assert_as_eager(call, model, [x], assert_near)
    assert tiny.packed_names(model) == ["fc1.weight", "fc2.weight"]
    assert count.count == 2
    for graph in count.graphs:
        assert any("apply_operands" in str(node.target) for node in graph.graph.nodes)


def test_graph_breaks_inside_a_submodule_keep_names_and_patterns(assert_near: Near) -> None:
    # Dynamo compiles the submodule's forward as a frame of its own, in which the submodule is the root.
    model = tiny.double(nn.Sequential(nn.Linear(tiny.WIDTH, tiny.WIDTH), tiny.Broken()))
    options = tiny.OPTIONS | {"layers": {"1.fc2": {"rank": 2}}, "exclude": ["0"]}
    call = torch.compile(model, backend="comera", options=options)
    call(x := tiny.rows(5))
    tiny.assert_as_eager(call, model, [x], assert_near)
    lines = {line.decision.name: line.decision.shape for line in comera.report(model).lines}
    assert lines["0.weight"] is None
    assert lines["1.fc1.weight"].bond == 4 and lines["1.fc2.weight"].bond == 2


def test_fullgraph(assert_near: Near) -> None:
    # The retrace must not count as a graph break.
    model = tiny.double(tiny.Mlp())
    call = compiled(model, fullgraph=True)
    call(x := tiny.rows(5))
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_module_compile_in_place(assert_near: Near) -> None:
    # model.compile() changes how the module itself is called; there is no wrapper to find the model through.
    model = tiny.double(tiny.Mlp())
    model.compile(backend="comera", options=tiny.OPTIONS | {"layers": {"fc1": {"rank": 3}}})
    first = tiny.outcome(model, model, x := tiny.rows(5))
    assert comera.report(model)["fc1.weight"].decision.shape.bond == 3
    twin = copy.deepcopy(model)
    twin._compiled_call_impl = None
    tiny.assert_same(first, tiny.outcome(twin, twin, x), assert_near)


GLOBAL = nn.Linear(tiny.WIDTH, 48).double()


def test_a_function_over_a_global_module(assert_near: Near) -> None:
    # The weight is reached through a global of the function, not through `self`.
    @torch.compile(backend="comera", options=tiny.OPTIONS)
    def call(x: Tensor) -> Tensor:
        return torch.tanh(GLOBAL(x))

    call(x := tiny.rows(4))
    assert tiny.packed_names(GLOBAL) == ["weight"]
    twin = copy.deepcopy(GLOBAL)
    expected = tiny.outcome(lambda x: torch.tanh(twin(x)), twin, x)
    tiny.assert_same(tiny.outcome(call, GLOBAL, x), expected, assert_near)


def test_a_function_over_closed_over_modules(assert_near: Near) -> None:
    # Two modules in the closure, a pattern that names one of them.
    first, second = tiny.double(nn.Linear(tiny.WIDTH, 48)), tiny.double(nn.Linear(48, tiny.WIDTH))
    both = nn.ModuleList([first, second])

    @torch.compile(backend="comera", options=tiny.OPTIONS)
    def call(x: Tensor) -> Tensor:
        return second(torch.tanh(first(x)))

    call(x := tiny.rows(4))
    assert tiny.packed_names(both) == ["0.weight", "1.weight"]
    twin = copy.deepcopy(both)
    expected = tiny.outcome(lambda x: twin[1](torch.tanh(twin[0](x))), twin, x)
    tiny.assert_same(tiny.outcome(call, both, x), expected, assert_near)


def test_a_loss_inside_and_outside_the_compiled_code(assert_near: Near) -> None:
    # Trainers compile the model; many scripts compile the whole loss function. Same gradients.
    model = tiny.double(tiny.Mlp())
    x, target = tiny.rows(4), tiny.rows(4)

    @torch.compile(backend="comera", options=tiny.OPTIONS)
    def loss_inside(x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), target)

    loss_inside(x, target).backward()
    inside = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    outside = compiled(model)
    nn.functional.mse_loss(outside(x), target).backward()
    for name, parameter in model.named_parameters():
        assert_near(inside[name], parameter.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, assert_near: Near) -> None:
    # The weights are used inside the checkpoint bodies only: the first call has to look into them.
    model = tiny.double(tiny.Checkpointed(use_reentrant))
    call, x = compiled(model), tiny.rows(5).requires_grad_()
    first = tiny.outcome(call, model, x)
    assert len(tiny.packed_names(model)) == 4
    plain = copy.deepcopy(model)
    reference = lambda x: [x := x + block(x) for block in plain.blocks][-1]  # noqa: E731
    tiny.assert_same(first, tiny.outcome(reference, plain, x), assert_near)
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_checkpoint_bodies_hold_planned_contractions() -> None:
    # Converting alone would leave the dense rebuild inside the bodies.
    count = tiny.Counter()
    model = tiny.double(tiny.Checkpointed(use_reentrant=False))
    torch.compile(model, backend="comera", options=count.options)(tiny.rows(5).requires_grad_())
    targets = [str(n.target) for g in count.graphs for m in g.modules() if hasattr(m, "graph") for n in m.graph.nodes]
    assert sum("apply_operands" in target for target in targets) == 4
    assert not any("tt_weight" in target or "rebuild_dense" in target for target in targets)


def test_gradients_accumulate_over_backwards(assert_near: Near) -> None:
    # Two backwards without zero_grad: the sum of both, as for any parameter.
    model = tiny.double(tiny.Mlp())
    call, batches = compiled(model), [tiny.rows(4), tiny.rows(4)]
    call(batches[0])
    single = [tiny.outcome(call, model, x) for x in batches]
    model.zero_grad()
    for x in batches:
        output = call(x)
        (output * output.detach().cos()).mean().backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, single[0][name] + single[1][name])


def test_two_forwards_then_two_backwards(assert_near: Near) -> None:
    # Contrastive losses: what the first forward saved must outlive the second.
    model = tiny.double(tiny.Mlp())
    call, (a, b) = compiled(model), (tiny.rows(4), tiny.rows(4))
    call(a)
    twin = copy.deepcopy(model)
    for f, m in ((call, model), (twin, twin)):
        m.zero_grad()
        (f(a) * f(b).tanh()).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(ours.grad, theirs.grad)


def test_a_second_backward_is_right_or_refused(assert_near: Near) -> None:
    # torch frees what a compiled backward saved as it goes; it says so, and how to keep it. Kept, gradients add up.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(4)
    once = tiny.outcome(call, model, x)
    with pytest.raises(RuntimeError, match="retain_graph"):
        call(x).sum().backward(retain_graph=True)
    torch._dynamo.reset()
    model.zero_grad()
    with torch._functorch.config.patch(donated_buffer=False):
        output = call(x)
        loss = (output * output.detach().cos()).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, 2 * once[name])


def test_a_gradient_of_a_gradient_is_refused() -> None:
    # Silently missing second-order terms would be worse: torch's compiled backward has none.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        torch.autograd.grad(call(x).sum(), x, create_graph=True)[0].sum().backward()


def test_multi_head_attention(assert_near: Near) -> None:
    # One opaque call for torch: its weights are rebuilt for it, in training and on the fused path of eval.
    model = tiny.double(nn.TransformerEncoderLayer(tiny.WIDTH, 4, 48, dropout=0.0, batch_first=True))
    call, x = compiled(model), tiny.rows(2, 5)
    call(x)
    names = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert [line.decision.name for line in comera.report(model).tensorized] == names
    tiny.assert_as_eager(call, model, [x], assert_near)
    model.eval()
    with torch.no_grad():
        assert_near(call(x), copy.deepcopy(model)(x))


def test_attention_eval_first(assert_near: Near) -> None:
    # In eval without gradients torch takes another path through the layer, straight to the weights.
    model = tiny.double(nn.TransformerEncoderLayer(tiny.WIDTH, 4, 48, dropout=0.0, batch_first=True)).eval()
    call, x = compiled(model), tiny.rows(2, 5)
    with torch.no_grad():
        first = call(x)
        assert_near(first, copy.deepcopy(model)(x))
    tiny.assert_as_eager(call, model.train(), [x], assert_near)


def test_a_padding_row_stays_zero_and_pushes_nothing(assert_near: Near) -> None:
    # Padding positions get zeros and give no gradient, however many there are.
    model = tiny.double(nn.Embedding(60, tiny.WIDTH, padding_idx=0))
    call = compiled(model)
    ids = torch.randint(1, 60, (40,))
    padded = torch.stack([ids, torch.zeros_like(ids)], 1).reshape(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        push = tiny.rows(80)
        gradients = []
        for indices, upstream in ((ids, push[::2]), (padded, push)):
            model.zero_grad()
            call(indices).backward(upstream)
            gradients.append(model._parameters["weight"].grad.clone())
        assert_near(gradients[1], gradients[0])
        optimizer.step()
    assert tiny.packed_names(model) == ["weight"]
    assert torch.equal(call(padded)[1::2], torch.zeros(40, tiny.WIDTH, dtype=torch.float64))


def test_the_backend_object_equals_the_name(assert_near: Near) -> None:
    # comera.Backend(...) is checked when made and does the same.
    model = tiny.double(tiny.Mlp())
    call = torch.compile(model, backend=comera.Backend(**tiny.OPTIONS))
    call(x := tiny.rows(4))
    assert len(tiny.packed_names(model)) == 2
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_no_recompile_while_training() -> None:
    # Optimizer steps change values only.
    count = tiny.Counter()
    model = tiny.double(tiny.Mlp())
    call = torch.compile(model, backend="comera", options=count.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        tiny.outcome(call, model, tiny.rows(4))
        optimizer.step()
    assert count.count == 1


def test_a_parameter_of_an_unknown_module_is_converted_by_its_use(assert_near: Near) -> None:
    # Eager tensorize cannot know what it is for; the graph shows that it is a linear weight, before or after.
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(48, tiny.WIDTH, dtype=torch.float64))
            self.offset = nn.Parameter(torch.randn(30, 48, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.matrix) + self.offset[3]

    model = comera.tensorize(Own(), **tiny.TENSORIZE)
    assert "only seen when compiled" in comera.report(model)["matrix"].decision.reason
    call, x = compiled(model), tiny.rows(4)
    call(x)
    assert comera.report(model)["matrix"].decision.shape.format == "tt"
    assert "not as a linear or embedding weight" in comera.report(model)["offset"].decision.reason
    tiny.assert_as_eager(call, model, [x], assert_near)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tiny.Tied, tiny.Mlp, tiny.Broken, lambda: tiny.Checkpointed(use_reentrant=False)])
def test_generated_code_equals_eager(kind: Callable[[], nn.Module], assert_near: Near) -> None:
    # The same situations lowered by Inductor, over batch sizes that make rows symbolic.
    model = tiny.double(kind())
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS | {"inner": "inductor"})
    for batch in (4, 1, 6, 9):
        ids, x = torch.randint(0, 60, (batch, 5)), tiny.rows(batch).requires_grad_()
        call(ids if isinstance(model, tiny.Tied) else x)
        tiny.assert_as_eager(call, model, [ids if isinstance(model, tiny.Tied) else x], assert_near, 10)
