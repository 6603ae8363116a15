"""One weight in several places, and several models or wrappers at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import comera_compile as comera
from tests import tiny_models as tiny

Near = Callable[..., None]


def compiled(model: nn.Module, **settings: object) -> Callable[..., Tensor]:
    """The one-line call; ``settings`` go to ``torch.compile``."""
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS, **settings)
    return call


def test_a_tied_embedding_and_head_train_one_weight(assert_near: Near) -> None:
    # The gradient is the sum of both uses, on one Parameter.
    model = tiny.double(tiny.Tied())
    call, ids = compiled(model), torch.randint(0, 60, (3, 5))
    call(ids)
    assert model.embed._parameters["weight"] is model.head._parameters["weight"]
    assert comera.report(model)["embed.weight"].decision.shape.format == "ttm"
    tiny.assert_as_eager(call, model, [ids], assert_near)


def test_tied_linear_modules(assert_near: Near) -> None:
    model = tiny.double(tiny.TiedLinear())
    call, x = compiled(model), tiny.rows(4)
    call(x)
    assert model.first._parameters["weight"] is model.second._parameters["weight"]
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_a_module_called_twice_sums_its_gradients(assert_near: Near) -> None:
    # A custom autograd function that is given one tensor twice may count it once.
    model = tiny.double(tiny.Twice())
    call, x = compiled(model), tiny.rows(4)
    call(x)
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_a_tied_copy_outside_the_compiled_root(assert_near: Near) -> None:
    # Only the body is compiled; the head, outside, holds the same weight and runs eagerly.
    body, head = tiny.double(nn.Linear(tiny.WIDTH, tiny.WIDTH)), tiny.double(nn.Linear(tiny.WIDTH, tiny.WIDTH))
    head.weight = body.weight
    call, x = compiled(body), tiny.rows(4)
    call(x)
    assert tiny.packed_names(head) == ["weight"]
    assert torch.equal(head.weight, body.weight) and head.weight.shape == (tiny.WIDTH, tiny.WIDTH)
    twin_body, twin_head = copy.deepcopy((body, head))
    tiny.assert_same(
        tiny.outcome(lambda x: head(call(x)), body, x),
        tiny.outcome(lambda x: twin_head(twin_body(x)), twin_body, x),
        assert_near,
    )


def test_two_compiled_wrappers_share_one_model(assert_near: Near) -> None:
    # The second wrapper meets weights that are packed already.
    model = tiny.double(tiny.Mlp())
    first, second, x = compiled(model), compiled(model), tiny.rows(4)
    assert_near(first(x), second(x))
    tiny.assert_as_eager(second, model, [x], assert_near)


def test_two_models_of_one_class_do_not_mix(assert_near: Near) -> None:
    # Their frames share code; options and weights are each model's own.
    models = [tiny.double(tiny.Mlp()) for _ in range(2)]
    calls = [
        torch.compile(m, backend="comera", options=tiny.OPTIONS | {"rank": r})
        for m, r in zip(models, (2, 4), strict=True)
    ]
    x = tiny.rows(4)
    for call, model, rank in zip(calls, models, (2, 4), strict=True):
        call(x)
        assert comera.report(model)["fc1.weight"].decision.shape.bond == rank
        tiny.assert_as_eager(call, model, [x], assert_near)


def test_a_nested_compiled_submodule(assert_near: Near) -> None:
    # Dynamo inlines the inner wrapper; names carry no trace of it.
    model = tiny.double(nn.Sequential(nn.Linear(tiny.WIDTH, tiny.WIDTH), tiny.Mlp()))
    model[1] = torch.compile(model[1], backend="comera", options=tiny.OPTIONS)
    call, x = compiled(model), tiny.rows(4)
    call(x)
    names = [line.decision.name for line in comera.report(model).lines]
    assert names == ["0.weight", "1.fc1.weight", "1.fc2.weight"]
    tiny.assert_as_eager(call, model, [x], assert_near)
