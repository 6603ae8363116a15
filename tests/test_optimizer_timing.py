"""Optimizers, schedules and averaged copies, made before or after the weights change their shape."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import comera_compile as comera
from comera_compile.errors import OptionError, WeightError
from comera_compile.weights.optimizer_state import steps_taken
from tests import tiny_models as tiny

Near = Callable[..., None]
DROPPED = "dropped the optimizer state"


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS)
    return call


def train(call: Callable[..., Tensor], optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = call(x)
        loss = (output * output.detach().cos()).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def structured(rows: int, cols: int, rank: int) -> Tensor:
    """A matrix that a tensor train of ``tiny.OPTIONS`` holds exactly and that does not look untrained."""
    layer = comera.tensorize(nn.Linear(cols, rows).double(), **tiny.TENSORIZE | {"rank": rank})
    return layer.weight.detach().as_subclass(Tensor).clone()


def trained_mlp() -> tiny.Mlp:
    """A model whose weights are decomposed, not drawn."""
    model = tiny.Mlp().double()
    with torch.no_grad():
        model.fc1.weight.copy_(structured(48, tiny.WIDTH, 3))
        model.fc2.weight.copy_(structured(tiny.WIDTH, 48, 3))
    return model


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),  # makes its state at construction, in dense shape
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_an_optimizer_made_before_the_first_call(kind: str, assert_near: Near) -> None:
    # It holds the same Parameter objects, so it trains the cores exactly as one made afterwards does.
    model = tiny.double(tiny.Mlp())
    optimizer, x = OPTIMIZERS[kind](model.parameters()), tiny.rows(4)
    call = compiled(model)
    call(x)
    twin = copy.deepcopy(model)
    ours = train(call, optimizer, x, 5)
    theirs = train(twin, OPTIMIZERS[kind](twin.parameters()), x, 5)
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, 1e3)
    assert ours[-1] != ours[0]


def test_dense_state_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture, assert_near: Near) -> None:
    # Moments of the dense matrix say nothing about cores. Those of biases and norms are kept.
    model = tiny.double(tiny.Mlp())
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), tiny.rows(4)
    optimizer.param_groups[0]["lr"] = 1e-6  # weights that still look untrained
    train(model, optimizer, x, 3)
    bias_moment = optimizer.state[model.fc1.bias]["exp_avg"].clone()
    call = compiled(model)
    with caplog.at_level(logging.WARNING, "comera_compile"):
        call(x)
        assert optimizer.state[model.fc1.bias]["exp_avg"].equal(bias_moment)
        train(call, optimizer, x, 4)
    warnings = [r.getMessage() for r in caplog.records if DROPPED in r.getMessage()]
    assert len(warnings) == 1 and "2 weight" in warnings[0]
    assert optimizer.state[model.fc1._parameters["weight"]]["step"] == 4
    assert optimizer.state[model.fc1.bias]["step"] == 7


def test_state_of_packed_size_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    # A resumed run loads model and optimizer into a compiled model before its first call.
    first = tiny.double(tiny.Mlp())
    call, x = compiled(first), tiny.rows(4)
    call(x)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    train(call, optimizer, x, 3)
    second = tiny.double(tiny.Mlp())
    resumed_call = compiled(second)
    resumed = torch.optim.AdamW(second.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_call.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING, "comera_compile"):
        ours, theirs = train(resumed_call, resumed, x, 3), train(call, optimizer, x, 3)
    assert ours == theirs  # the same graphs on the same bits
    assert not [r for r in caplog.records if DROPPED in r.getMessage()]


def test_dense_state_loaded_after_the_conversion_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    # An optimizer checkpoint of a dense run, loaded into a tensorized one.
    dense = tiny.double(tiny.Mlp())
    old, x = torch.optim.AdamW(dense.parameters(), lr=1e-2), tiny.rows(4)
    train(dense, old, x, 2)
    model = tiny.double(tiny.Mlp())
    call = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(call, optimizer, x, 2)
    optimizer.load_state_dict(old.state_dict())
    with caplog.at_level(logging.WARNING, "comera_compile"):
        train(call, optimizer, x, 2)
    assert len([r for r in caplog.records if DROPPED in r.getMessage()]) == 1


def test_two_optimizers_are_looked_through_each(caplog: pytest.LogCaptureFixture) -> None:
    # One for each layer, as in alternating training: each warns once about its own weight.
    model = tiny.double(tiny.Mlp())
    x = tiny.rows(4)
    halves = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model.fc1, model.fc2)]
    model(x).sum().backward()
    for optimizer in halves:
        optimizer.step()
    call = compiled(model)
    call(x).sum().backward()
    with caplog.at_level(logging.WARNING, "comera_compile"):
        for optimizer in halves * 2:
            optimizer.step()
    assert len([r for r in caplog.records if DROPPED in r.getMessage()]) == 2


def test_a_stale_gradient_is_cleared() -> None:
    # A dense .grad left from an eager step has the wrong shape for the packed weight.
    model = tiny.double(tiny.Mlp())
    model(x := tiny.rows(4)).sum().backward()
    compiled(model)(x).sum().backward()
    assert model.fc1._parameters["weight"].grad.shape == model.fc1._parameters["weight"].shape


def test_schedulers_drive_the_rate_without_recompiling() -> None:
    # Step sizes follow the schedule; SGD's update is rate times gradient, so the rate can be read off.
    count = tiny.Counter()
    model = tiny.double(tiny.Mlp())
    call, x = torch.compile(model, backend="comera", options=count.options), tiny.rows(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    for step in range(4):
        tiny.outcome(call, model, x)
        packed = model.fc1._parameters["weight"]
        before, grad = packed.detach().clone(), packed.grad.clone()
        optimizer.step()
        assert torch.allclose(before - packed, step / 10 * grad, rtol=1e-12, atol=1e-15)
        scheduler.step()
    assert count.count == 1


def test_gradient_clipping_uses_the_packed_gradients(assert_near: Near) -> None:
    # clip_grad_norm_ as everybody calls it.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(4)
    found = tiny.outcome(call, model, x)
    total = torch.stack([g.norm() for n, g in found.items() if n not in ("loss", "output")]).norm()
    assert_near(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3), total)
    assert_near(torch.stack([p.grad.norm() for p in model.parameters()]).norm(), torch.tensor(1e-3).double(), 1e9)


def test_a_frozen_copy_made_before_follows(assert_near: Near) -> None:
    # The hand-written EMA: a frozen deepcopy, averaged parameter by parameter.
    model = tiny.double(tiny.Mlp())
    ema = copy.deepcopy(model).requires_grad_(False)
    call, x = compiled(model), tiny.rows(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(call, optimizer, x, 1)
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 1.0)
    assert_near(ema(x), model(x).detach())
    assert not any(p.requires_grad for p in ema.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_averaged_model_made_before(wrapped: bool, assert_near: Near) -> None:
    # torch's AveragedModel of the plain model or of the compiled one, not updated yet.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(4)
    average = AveragedModel(call if wrapped else model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(call, optimizer, x, 1)
    average.update_parameters(call if wrapped else model)
    assert_near(average(x), model(x).detach())
    before = [p.detach().clone() for p in average.module.parameters()]
    train(call, optimizer, x, 1)
    average.update_parameters(call if wrapped else model)
    for a, b, p in zip(average.module.parameters(), before, model.parameters(), strict=True):
        assert_near(a.detach(), (b + p.detach()) / 2)


def test_an_averaged_model_that_has_diverged_keeps_its_average(assert_near: Near) -> None:
    # Its weights are decomposed on their own; cores of two decompositions must not be averaged unless they are
    # brought into the same gauge. The truth is the average of the dense matrices.
    source = comera.tensorize(tiny.double(tiny.Mlp()), **tiny.TENSORIZE | {"rank": 7})
    model = tiny.double(tiny.Mlp())
    model.load_state_dict(comera.dense_state_dict(source))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02 * parameter.std().item())
    model.load_state_dict(comera.dense_state_dict(source))
    dense_average, dense_model = (m.fc1.weight.detach().clone() for m in (average.module, model))
    comera.tensorize(model, **tiny.TENSORIZE | {"rank": 7})
    assert tiny.packed_names(average.module) == tiny.packed_names(model) == ["fc1.weight", "fc2.weight"]
    assert_near(average.module.fc1.weight.detach(), dense_average, 1e4)
    average.update_parameters(model)
    expected = (dense_average + dense_model) / 2
    difference = (average.module.fc1.weight.detach() - expected).norm() / (dense_average - dense_model).norm()
    assert difference < 0.05  # second order in the 2 % by which their cores differ


def test_an_average_too_rich_for_the_ranks_is_refused() -> None:
    # Cutting it would throw an average away; the model is left as it was.
    model = trained_mlp()
    average = AveragedModel(model)
    with torch.no_grad():
        average.module.fc1.weight.add_(structured(48, tiny.WIDTH, 12), alpha=0.3)
    before, before_average = tiny.snapshot(model), tiny.snapshot(average)
    with pytest.raises(WeightError, match=r"AveragedModel.*fc1\.weight"):
        compiled(model)(tiny.rows(4))
    tiny.assert_unchanged(before, model)
    tiny.assert_unchanged(before_average, average)


def test_the_average_of_another_model_is_left_alone() -> None:
    # Two models of one class, as in a GAN: converting the first must not touch the average of the second.
    first, second = (tiny.double(tiny.Mlp()) for _ in range(2))
    average = AveragedModel(second)
    before = tiny.snapshot(average)
    compiled(first)(tiny.rows(2))
    tiny.assert_unchanged(before, average)
    compiled(second)(x := tiny.rows(2))
    assert tiny.packed_names(average.module) == tiny.packed_names(second)
    assert torch.equal(average(x), second(x))


def test_param_groups_scale_decay_by_the_number_of_cores() -> None:
    # K cores shrunk by 1 - lr*wd/K each shrink the matrix by about 1 - lr*wd, as the dense layer's decay does.
    model = comera.tensorize(tiny.double(tiny.Mlp()), **tiny.TENSORIZE)
    groups = comera.param_groups(model, weight_decay=0.1)
    by_decay = {g["weight_decay"]: {id(p) for p in g["params"]} for g in groups}
    packed = {id(m._parameters["weight"]) for m in (model.fc1, model.fc2)}
    assert by_decay == {0.1 / 4: packed, 0.0: {id(p) for p in model.parameters()} - packed}
    before = model.fc1.weight.detach().clone()
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.fc1.weight, before * (1 - 0.01 * 0.1), rtol=1e-6)


def test_param_groups_of_a_mixed_model_cover_each_parameter_once() -> None:
    # Dense matrices keep the decay; the compiled wrapper is looked through.
    model = comera.tensorize(nn.Sequential(tiny.Mlp(), nn.Linear(tiny.WIDTH, 3)), **tiny.TENSORIZE)
    groups = comera.param_groups(torch.compile(model, backend="comera"), weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    assert [g["weight_decay"] for g in groups if any(p is model[1].weight for p in g["params"])] == [0.1]


@pytest.mark.parametrize("decay", [-0.1, float("nan")])
def test_param_groups_refuse_impossible_decay(decay: float) -> None:
    model = comera.tensorize(tiny.Mlp(), **tiny.TENSORIZE)
    with pytest.raises(OptionError, match="weight_decay must be at least 0"):
        comera.param_groups(model, weight_decay=decay)


def test_param_groups_refuse_a_model_that_is_still_dense() -> None:
    # It could not tell cores from biases; the message says what to call first.
    with pytest.raises(OptionError, match=r"comera\.tensorize"):
        comera.param_groups(tiny.Mlp(), weight_decay=0.1)


@pytest.mark.parametrize(("steps", "kept"), [(3, False), (4, True), (40, True)])
@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_an_optimizer_has_trained_are_not_drawn_anew(steps: int, kept: bool, fused: bool) -> None:
    # Small steps leave the spectrum of noise; a step or two to try the loop out do not count.
    torch.manual_seed(0)
    model = tiny.Mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    train(model, optimizer, tiny.rows(5), steps)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    comera.tensorize(model, **tiny.OPTIONS)
    same = all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert same is kept
    assert comera.report(model)["fc1.weight"].decision.reason.startswith(f"trained ({steps} opt" if kept else "untr")


def test_the_steps_of_another_model_or_of_packed_weights_do_not_count() -> None:
    model, other = tiny.Mlp().double(), tiny.Mlp().double()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-4)
    train(other, optimizer, tiny.rows(5), 9)
    assert steps_taken(model.parameters()) == {}
    assert set(steps_taken(other.parameters()).values()) == {9}
    (packed := torch.optim.AdamW(model.parameters())).state[model.fc1.weight] = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.zeros(11),
    }
    assert steps_taken(model.parameters()) == {} and packed.state
