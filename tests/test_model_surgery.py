"""What people do to a model around training: copy, pickle, replace, freeze, load. Each is seen at once."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import comera_compile as comera
from tests import tiny_models as tiny

Near = Callable[..., None]


@pytest.fixture
def model() -> nn.Module:
    """A tensorized model in float64."""
    return comera.tensorize(tiny.double(tiny.Mlp()), **tiny.TENSORIZE)


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS)
    return call


def test_deepcopy_is_independent_and_equal(model: nn.Module, assert_near: Near) -> None:
    call, x = compiled(model), tiny.rows(3)
    twin = copy.deepcopy(model)
    assert type(twin.fc1) is type(model.fc1) and isinstance(twin.fc1, nn.Linear)
    assert_near(compiled(twin)(x), call(x))
    with torch.no_grad():
        twin.fc1._parameters["weight"].zero_()
    assert not torch.equal(twin(x), model(x))


def test_deepcopy_keeps_ties() -> None:
    # One Parameter before, one Parameter after: else the copy would train two.
    twin = copy.deepcopy(comera.tensorize(tiny.Tied(), **tiny.TENSORIZE))
    assert twin.embed._parameters["weight"] is twin.head._parameters["weight"]
    assert torch.equal(twin.embed.weight, twin.head.weight)


def test_deepcopy_of_a_compiled_model_that_was_called(assert_near: Near) -> None:
    # What EMA implementations do with whatever the trainer hands them.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(3)
    call(x)
    twin = copy.deepcopy(call)
    assert_near(twin(x), call(x))
    assert len(tiny.packed_names(twin)) == 2


@pytest.mark.parametrize("through", ["pickle", "torch"])
def test_pickling_the_whole_model(model: nn.Module, through: str, assert_near: Near) -> None:
    # The swapped class exists in this process only: the pickle names the class that can be imported.
    buffer = io.BytesIO()
    if through == "pickle":
        pickle.dump(model, buffer)
    else:
        torch.save(model, buffer)
    assert b"TTLinear" not in buffer.getvalue()
    buffer.seek(0)
    loaded = pickle.load(buffer) if through == "pickle" else torch.load(buffer, weights_only=False)
    assert type(loaded.fc1) is type(model.fc1)
    assert_near(loaded(x := tiny.rows(3)), model(x))
    tiny.assert_as_eager(compiled(loaded), loaded, [x], assert_near)


def test_saving_a_dense_weight_saves_a_plain_tensor(model: nn.Module) -> None:
    # `torch.save(model.fc1.weight)` must load where this package is not known, with weights_only.
    buffer = io.BytesIO()
    torch.save(model.fc1.weight, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded) is Tensor and torch.equal(loaded, model.fc1.weight)


def test_a_replaced_layer_is_used_at_the_next_call(assert_near: Near) -> None:
    # A dense layer put in after compiling is converted like the others and its output is what comes out.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(3)
    before = call(x)
    model.fc2 = nn.Linear(48, tiny.WIDTH).double()
    assert not torch.allclose(call(x), before)
    assert tiny.packed_names(model) == ["fc1.weight", "fc2.weight"]
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_a_replaced_parameter_is_used_at_the_next_call(assert_near: Near) -> None:
    # Another Parameter under the old name: the module is dense there again, and is converted anew.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(3)
    call(x)
    model.fc2.weight = nn.Parameter(torch.randn(tiny.WIDTH, 48, dtype=torch.float64))
    assert model.fc2.weight.shape == (tiny.WIDTH, 48) and isinstance(model.fc2.weight, nn.Parameter)
    call(x)
    assert model.fc2._parameters["weight"].dim() == 1
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_a_parameter_made_from_a_dense_weight_stands_alone(model: nn.Module) -> None:
    # nn.Parameter(layer.weight.data) is how layers are copied by hand: training it must not touch the old cores.
    fresh = nn.Linear(tiny.WIDTH, 48).double()
    for source in (model.fc1.weight, model.fc1.weight.data):
        fresh.weight = nn.Parameter(source)
        assert type(fresh.weight) is nn.Parameter and fresh.weight.requires_grad
        before = model.fc1._parameters["weight"].detach().clone()
        fresh(tiny.rows(2)).sum().backward()
        torch.optim.SGD(fresh.parameters(), lr=1.0).step()
        assert torch.equal(model.fc1._parameters["weight"], before)
        assert not torch.equal(fresh.weight, model.fc1.weight)
    assert type(copy.deepcopy(model.fc1.weight)) is nn.Parameter


def test_freezing_a_layer(assert_near: Near) -> None:
    # Recompiled without that gradient; unfrozen again, it trains again.
    model = tiny.double(tiny.Mlp())
    call, x = compiled(model), tiny.rows(3)
    call(x)
    for frozen in (True, False):
        model.fc1.requires_grad_(not frozen)
        twin = copy.deepcopy(model)
        found = tiny.outcome(call, model, x)
        tiny.assert_same(found, tiny.outcome(twin, twin, x), assert_near)
        assert ("fc1.weight" in found) is not frozen


def test_freezing_through_the_dense_weight(model: nn.Module) -> None:
    # `layer.weight.requires_grad = False` and `.requires_grad_(False)` mean the parameter.
    model.fc1.weight.requires_grad = False
    assert not model.fc1._parameters["weight"].requires_grad
    model.fc1.weight.requires_grad_(True)
    assert model.fc1._parameters["weight"].requires_grad


def test_a_loaded_state_dict_is_used_at_the_next_call(assert_near: Near) -> None:
    # Same shapes: no recompilation is needed, and no old value may survive in a graph.
    count = tiny.Counter()
    model, other = (tiny.double(tiny.Mlp()) for _ in range(2))
    comera.tensorize(other, **tiny.TENSORIZE)
    call, x = torch.compile(model, backend="comera", options=count.options), tiny.rows(3)
    call(x)
    call.load_state_dict(other.state_dict())
    assert_near(call(x), other(x))
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_conversions_of_dtype(model: nn.Module, assert_near: Near) -> None:
    # .float() after tensorizing: cores and dense meaning follow.
    x = tiny.rows(3)
    expected = model(x)
    model.float()
    assert model.fc1.weight.dtype == torch.float32
    assert_near(compiled(model)(x.float()), expected.float())


def test_reads_of_the_dense_weight_train_eagerly(model: nn.Module, assert_near: Near) -> None:
    # A regulariser on module.weight outside the compiled code: its gradient reaches the cores.
    twin = copy.deepcopy(model)
    model.fc1.weight.pow(2).sum().backward()
    packed = twin.fc1._parameters["weight"]
    (grad,) = torch.autograd.grad(twin.fc1.weight.pow(2).sum(), packed)
    assert_near(model.fc1._parameters["weight"].grad, grad)
    step = 1e-6 * grad / grad.norm()
    with torch.no_grad():
        loss = twin.fc1.weight.pow(2).sum()
        packed.add_(step)
        slope = (twin.fc1.weight.pow(2).sum() - loss) / 1e-6
    assert abs(slope.item() - grad.norm().item()) < 1e-4 * grad.norm().item()


def test_weight_norm_of_a_packed_layer(model: nn.Module, assert_near: Near) -> None:
    # It deletes the parameter and puts a computed tensor in its place at every forward.
    x = tiny.rows(3)
    expected = model.fc1(x)
    layer = torch.nn.utils.weight_norm(model.fc1)
    assert {"weight_g", "weight_v"} <= dict(layer.named_parameters()).keys()
    assert_near(layer(x), expected)


def test_functional_call_with_other_values(model: nn.Module, assert_near: Near) -> None:
    # torch.func users pass parameters by name: packed ones, or dense ones in their place.
    x = tiny.rows(3)
    packed = {n: p.detach() * 2 for n, p in model.named_parameters()}
    dense = {n: p.detach() for n, p in comera.dense_state_dict(model).items()}
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    assert_near(torch.func.functional_call(model, packed, (x,)), doubled(x))
    assert_near(torch.func.functional_call(model, dense, (x,)), model(x))


def test_densify_gives_back_an_ordinary_model(model: nn.Module, assert_near: Near) -> None:
    x = tiny.rows(3)
    parameters, expected, state = list(model.parameters()), model(x).detach(), comera.dense_state_dict(model)
    comera.densify(model)
    assert type(model.fc1) is nn.Linear and all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_near(model(x), expected)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_compiled_model_is_converted_again_after_densify() -> None:
    # As its docstring says: to stay dense, the module itself is called, or compiled with another backend.
    model, x = tiny.double(tiny.Mlp()), tiny.rows(3)
    call = torch.compile(model, backend="comera", options=tiny.OPTIONS)
    call(x)
    comera.densify(call)
    model(x)
    assert tiny.packed_names(model) == []
    call(x)
    assert len(tiny.packed_names(model)) == 2


def test_densify_reaches_a_tied_owner_outside() -> None:
    body = nn.Linear(tiny.WIDTH, tiny.WIDTH)
    head = nn.Linear(tiny.WIDTH, tiny.WIDTH)
    head.weight = body.weight
    comera.densify(comera.tensorize(body, **tiny.TENSORIZE))
    assert type(head) is nn.Linear and head.weight is body.weight and head.weight.dim() == 2


def test_second_derivatives_of_the_eager_model(model: nn.Module, assert_near: Near) -> None:
    # Gradient penalties: the dense matrix is made of plain differentiable operations.
    plain, x = tiny.double(tiny.Mlp()), tiny.rows(3).requires_grad_()
    plain.load_state_dict(comera.dense_state_dict(model))
    penalties = []
    for subject in (model, plain):
        (gradient,) = torch.autograd.grad(subject(x).pow(2).sum(), x, create_graph=True)
        penalties.append(gradient.pow(2).sum())
    assert_near(*penalties, 10)
    ours, theirs = (torch.autograd.grad(p, m.fc1.bias)[0] for p, m in zip(penalties, (model, plain), strict=True))
    assert_near(ours, theirs, 100)


def test_gradients_of_single_samples(model: nn.Module, assert_near: Near) -> None:
    # torch.func's way: vmap over grad of functional_call, by packed parameters.
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = tiny.rows(3, 1)

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (sample,)).pow(2).sum()

    single = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    model(x).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert_near(single[name].sum(0), parameter.grad, 10)


def test_a_dense_weight_may_be_given_to_compiled_code(model: nn.Module, assert_near: Near) -> None:
    # A compiled regulariser: for Dynamo it is a plain tensor with a history.
    call = torch.compile(lambda weight: (weight * weight).sum(), backend="aot_eager", fullgraph=True)
    call(model.fc1.weight).backward()
    found = model.fc1._parameters["weight"].grad.clone()
    model.zero_grad()
    model.fc1.weight.pow(2).sum().backward()
    assert_near(found, model.fc1._parameters["weight"].grad)


def test_the_meta_device(model: nn.Module) -> None:
    # Sizes without values, then values from a checkpoint: how large models are set up.
    state = model.state_dict()
    model.to("meta")
    assert model.fc1.weight.shape == (48, tiny.WIDTH) and model.fc1.weight.device.type == "meta"
    model.load_state_dict(state, assign=True)
    assert torch.equal(model.fc1._parameters["weight"], state["fc1.weight"])


def test_the_eager_model_under_inference_mode(model: nn.Module, assert_near: Near) -> None:
    # Evaluation without the compiled wrapper: reading the weight works, and so does writing to it.
    x = tiny.rows(3)
    expected = model(x).detach()
    with torch.inference_mode():
        assert_near(model(x).clone(), expected)
        before = model.fc1.weight.clone()
        model.fc1.weight.mul_(0.5)
        assert_near(model.fc1.weight.clone(), before / 2)
    assert not model.fc1._parameters["weight"].is_inference()
    tiny.assert_as_eager(compiled(model), model, [x], assert_near)


def test_the_eager_model_under_no_grad_and_back(model: nn.Module) -> None:
    # The grad mode outside decides, as for any layer.
    x = tiny.rows(3)
    with torch.no_grad():
        assert not model(x).requires_grad and not model.fc1.weight.requires_grad
    assert model(x).requires_grad and model.fc1.weight.requires_grad


def test_tying_again_keeps_one_parameter() -> None:
    # transformers ties weights anew after loading: `head.weight = embed.weight` on packed modules.
    model = comera.tensorize(tiny.Tied(), **tiny.TENSORIZE)
    packed = model.embed._parameters["weight"]
    assert isinstance(model.embed.weight, nn.Parameter)
    model.head.weight = model.embed.weight
    assert model.head._parameters["weight"] is packed
    model.head.weight = nn.Parameter(torch.zeros(60, tiny.WIDTH))
    model.head.weight = model.embed.weight
    assert model.head._parameters["weight"] is packed and torch.equal(model.head.weight, model.embed.weight)


def test_tying_a_plain_layer_to_a_packed_weight_is_refused() -> None:
    # It would not know what the packed vector means; tie first, then tensorize.
    model, head = comera.tensorize(tiny.Tied(), **tiny.TENSORIZE), nn.Linear(tiny.WIDTH, 60)
    with pytest.raises(ValueError, match="non-leaf"):
        head.weight = model.embed.weight
    assert type(head.weight) is nn.Parameter


def test_a_parametrization_trains_the_dense_matrix(model: nn.Module, assert_near: Near) -> None:
    # weight_norm takes the matrix apart into parameters of its own: as buffers they would silently not be trained.
    x = tiny.rows(3)
    expected = model(x).detach()
    torch.nn.utils.parametrizations.weight_norm(model.fc1)
    assert_near(model(x), expected, 10)
    model(x).sum().backward()
    originals = [p for n, p in model.named_parameters() if "fc1.parametrizations" in n]
    assert len(originals) == 2 and all(p.grad is not None for p in originals)
