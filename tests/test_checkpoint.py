"""State dicts saved and loaded across forms, files and wrappers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import comera_compile as comera
from comera_compile.errors import OptionError, ShapeError
from comera_compile.tt.shape import TTShape
from tests import tiny_models as tiny

Near = Callable[..., None]
ROOT = Path(__file__).resolve().parents[1]


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS | options)
    return call


def tensorized(kind: Callable[[], nn.Module] = tiny.Mlp, **options: Any) -> nn.Module:
    return comera.tensorize(kind().double(), **tiny.TENSORIZE | options)


def assert_equal_models(ours: nn.Module, theirs: nn.Module) -> None:
    """Bit-equal state, layouts included, and the same meaning."""
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    for m, n in zip(ours.modules(), theirs.modules(), strict=True):
        if isinstance(m, nn.Linear):
            assert torch.equal(m.weight, n.weight)


def test_keys_and_layouts_of_a_state_dict() -> None:
    # Every name stays; one int64 vector a packed weight is added and says all about it.
    dense, model = tiny.Mlp().double(), tensorized()
    state = model.state_dict()
    assert state.keys() == dense.state_dict().keys() | {"fc1.weight_tt", "fc2.weight_tt"}
    shape = TTShape.from_tensor(state["fc1.weight_tt"])
    assert (shape.rows, shape.cols) == (48, tiny.WIDTH) and state["fc1.weight"].shape == (shape.numel,)
    assert state["fc1.weight_tt"].dtype == torch.int64


@pytest.mark.parametrize("options", [{}, {"rank": 6}, {"rank": 2}, {"order": 3}, {"modes": ((6, 8), (4, 8))}])
def test_between_tensorized_models(options: dict[str, Any]) -> None:
    # The checkpoint's modes, ranks and scale win, whatever the model had.
    if "modes" in options:
        options = {"layers": {"fc1": options}}
    source, target = tensorized(**options), tensorized()
    parameters = list(target.parameters())
    target.load_state_dict(source.state_dict(), strict=True)
    assert_equal_models(target, source)
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))


def test_another_scale_alone_is_taken_over() -> None:
    # Same modes and ranks, other stored scale: the vector alone would mean another matrix.
    source, target = tiny.Mlp().double(), tensorized()
    with torch.no_grad():
        source.fc1.weight.mul_(50)
    comera.tensorize(source, **tiny.TENSORIZE)
    scales = [TTShape.from_tensor(m.state_dict()["fc1.weight_tt"]).scale for m in (source, target)]
    assert scales[0] != scales[1]
    target.load_state_dict(source.state_dict())
    assert_equal_models(target, source)


@pytest.mark.parametrize("kind", [tiny.Tied, tiny.TiedLinear])
@pytest.mark.parametrize("rank", [4, 2])
def test_tied_weights_with_other_ranks(kind: Callable[[], nn.Module], rank: int) -> None:
    # One Parameter, two owners: both must learn the new layout, and stay tied.
    source, target = tensorized(kind, rank=rank), tensorized(kind)
    target.load_state_dict(source.state_dict(), strict=True)
    assert_equal_models(target, source)
    assert len(list(target.parameters())) == len(list(source.parameters()))


def test_other_ranks_reach_compiled_code_and_optimizer(assert_near: Near, caplog: pytest.LogCaptureFixture) -> None:
    # Loaded between two steps: the graph is compiled for the new layout, moments of the old size are dropped.
    model, source = tiny.double(tiny.Mlp()), tensorized(rank=2)
    call, x = compiled(model), tiny.rows(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tiny.outcome(call, model, x)
    optimizer.step()
    call.load_state_dict(source.state_dict())
    tiny.assert_as_eager(call, model, [x], assert_near)
    assert_near(call(x), source(x))
    with caplog.at_level(logging.WARNING, "comera_compile"):
        tiny.outcome(call, model, x)
        optimizer.step()
    assert len([r for r in caplog.records if "dropped the optimizer state of 2" in r.getMessage()]) == 1


def test_into_a_model_compiled_but_not_called(assert_near: Near) -> None:
    # It is still dense: loading converts it, and the first call does not convert it again.
    source, model = tensorized(rank=3), tiny.double(tiny.Mlp())
    parameters = list(model.parameters())
    call = compiled(model)
    call.load_state_dict(source.state_dict(), strict=True)
    assert_equal_models(model, source)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_near(call(x := tiny.rows(3)), source(x))
    assert_equal_models(model, source)
    assert {line.decision.reason for line in comera.report(model).tensorized} == {"loaded from a checkpoint"}


def test_dense_into_tensorized_converts(assert_near: Near) -> None:
    # Values that the ranks can hold arrive within rounding.
    source, target = comera.densify(tensorized(rank=3)), tensorized()
    target.load_state_dict(source.state_dict(), strict=True)
    assert tiny.packed_names(target) == ["fc1.weight", "fc2.weight"]
    assert_near(target(x := tiny.rows(3)), source(x), 1e3)


def test_dense_values_that_do_not_fit_stay_dense(caplog: pytest.LogCaptureFixture, assert_near: Near) -> None:
    # A trained weight is never thrown away: that layer becomes dense again, with a warning, tied owners included.
    source, target = tiny.TiedLinear().double(), tensorized(tiny.TiedLinear)
    with torch.no_grad():
        nn.init.eye_(source.first.weight)
    with caplog.at_level(logging.WARNING, "comera_compile"):
        target.load_state_dict(source.state_dict(), strict=True)
    assert type(target.first) is type(target.second) is nn.Linear
    assert target.first.weight is target.second.weight and torch.equal(target.first.weight, source.first.weight)
    assert any("first.weight" in r.getMessage() and "stays dense" in r.getMessage() for r in caplog.records)
    assert comera.report(target)["first.weight"].decision.shape is None
    call = compiled(target)
    assert_near(call(x := tiny.rows(3)), source(x))


def test_dense_state_dict_loads_into_plain_pytorch(assert_near: Near) -> None:
    # Names without the wrapper, matrices in their own sizes, no layout left; ties are kept.
    model = tensorized(tiny.Tied)
    plain, ids = tiny.Tied().double(), torch.randint(0, 60, (4,))
    for source in (model, compiled(model), model.state_dict()):
        state = comera.dense_state_dict(source)
        assert state.keys() == plain.state_dict().keys()
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        plain.load_state_dict(state, strict=True)
        assert_near(plain(ids), model(ids))


def test_torch_save_with_weights_only(tmp_path: Path) -> None:
    source, target = tensorized(), tensorized()
    torch.save(source.state_dict(), tmp_path / "model.pt")
    target.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert_equal_models(target, source)


@pytest.mark.parametrize("called", ["tensorized", "dense"])
def test_safetensors_save_model(tmp_path: Path, called: str) -> None:
    # It stores tied weights once: the second name has a layout and no value.
    source, target = tensorized(tiny.Tied), tiny.Tied().double()
    if called == "tensorized":
        comera.tensorize(target, **tiny.TENSORIZE | {"rank": 2})
    safetensors.torch.save_model(source, str(tmp_path / "model.safetensors"))
    missing, unexpected = safetensors.torch.load_model(target, str(tmp_path / "model.safetensors"), strict=True)
    assert not missing and not unexpected
    assert_equal_models(target, source)
    assert target.embed._parameters["weight"] is target.head._parameters["weight"]


def test_safetensors_save_file(tmp_path: Path) -> None:
    source, target = tensorized(), tiny.Mlp().double()
    safetensors.torch.save_file(source.state_dict(), str(tmp_path / "model.safetensors"))
    target.load_state_dict(safetensors.torch.load_file(str(tmp_path / "model.safetensors")), strict=True)
    assert_equal_models(target, source)


@pytest.mark.parametrize("saved", ["plain", "wrapped", "nested"])
@pytest.mark.parametrize("loaded", ["plain", "wrapped", "nested"])
@pytest.mark.parametrize("form", ["packed", "dense"])
def test_the_wrapper_prefix_does_not_matter(saved: str, loaded: str, form: str, assert_near: Near) -> None:
    # Saved from and loaded into the model, torch.compile's wrapper, or a model with a compiled submodule.
    def wrap(model: nn.Module, how: str) -> Any:
        if how == "nested":
            model[1] = torch.compile(model[1], backend="comera", options=tiny.OPTIONS)
        return compiled(model) if how == "wrapped" else model

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(tiny.WIDTH, tiny.WIDTH), tiny.Mlp())

    source, target = tensorized(build, rank=3), tensorized(build)
    x = tiny.rows(3)
    expected = source(x).detach()
    if form == "dense":
        comera.densify(source)
    state = wrap(source, saved).state_dict()
    wrap(target, loaded).load_state_dict(state, strict=True)
    assert_near(target(x), expected, 1e3)
    assert len(tiny.packed_names(target)) == 3


def test_strict_reports_missing_and_unexpected_keys() -> None:
    # As torch does, layouts included: a vector without its layout could mean anything.
    model = tensorized()
    for change, text in (
        (lambda s: s.pop("fc2.bias"), r"Missing key.*fc2\.bias"),
        (lambda s: s.pop("fc1.weight_tt"), r"Missing key.*fc1\.weight_tt"),
        (lambda s: s.pop("fc1.weight"), r"Missing key.*fc1\.weight"),
        (lambda s: s.update(other=torch.zeros(1)), "Unexpected key.*other"),
    ):
        state = model.state_dict()
        change(state)
        with pytest.raises(RuntimeError, match=text):
            tensorized().load_state_dict(state)
        result = tensorized().load_state_dict(state, strict=False)
        assert len(result.missing_keys) + len(result.unexpected_keys) <= 1


@pytest.mark.parametrize("target", ["tensorized", "dense"])
def test_another_size_is_refused_and_nothing_changes(target: str) -> None:
    # The message names the weight, both sizes and what to do.
    source = comera.tensorize(nn.Sequential(nn.Linear(tiny.WIDTH, 40), nn.Linear(40, tiny.WIDTH)), **tiny.TENSORIZE)
    model = nn.Sequential(nn.Linear(tiny.WIDTH, 48), nn.Linear(48, tiny.WIDTH))
    if target == "tensorized":
        comera.tensorize(model, **tiny.TENSORIZE)
    before = tiny.snapshot(model)
    with pytest.raises(ShapeError, match=r"0\.weight.*48x32.*40x32.*same model"):
        model.load_state_dict(source.state_dict())
    tiny.assert_unchanged(before, model)


@pytest.mark.parametrize("target", ["tensorized", "dense"])
def test_halves_of_an_entry_that_do_not_fit_each_other_are_told(target: str) -> None:
    # A matrix put back by hand beside the layout of the packed vector that was there; a vector cut short. The message
    # says which two entries contradict each other, not that the matrix has the wrong size, which it has not.
    state = tensorized().state_dict()
    matrix = state | {"fc1.weight": tiny.Mlp().double().fc1.weight.detach()}
    short = state | {"fc1.weight": state["fc1.weight"][:-1]}
    model = tiny.Mlp().double() if target == "dense" else tensorized()
    before, numel = tiny.snapshot(model), TTShape.from_tensor(state["fc1.weight_tt"]).numel
    packed = rf"'fc1\.weight_tt' describes a packed vector of {numel} elements \(a tensor train of 48x32\)"
    with pytest.raises(ShapeError, match=rf"fc1\.weight: .* matrix of 48x32, but .*{packed}.*drop 'fc1\.weight_tt"):
        model.load_state_dict(matrix)
    with pytest.raises(ShapeError, match=rf"shape \({numel - 1},\), but .*{packed}: take both entries from one"):
        model.load_state_dict(short)
    tiny.assert_unchanged(before, model)
    del matrix["fc1.weight_tt"]  # the remedy
    model.load_state_dict(matrix)


def test_a_damaged_or_newer_layout_is_refused() -> None:
    model = tensorized()
    state = model.state_dict()
    state["fc1.weight_tt"] = state["fc1.weight_tt"].clone()
    state["fc1.weight_tt"][0] = 99
    with pytest.raises(ShapeError, match=r"layout version.*99.*update"):
        tensorized().load_state_dict(state)


def test_tensorize_takes_shapes_and_values_from_a_state_dict(assert_near: Near) -> None:
    # Only what is packed there is packed here; nothing but those weights is loaded.
    source, model = tensorized(exclude=["fc2"], rank=3), tiny.Mlp().double()
    bias = model.fc1.bias.detach().clone()
    comera.tensorize(model, state_dict=source.state_dict())
    assert tiny.packed_names(model) == ["fc1.weight"]
    assert torch.equal(model.fc1.weight, source.fc1.weight) and torch.equal(model.fc1.bias, bias)
    call = compiled(model, exclude=["fc2"])
    call(x := tiny.rows(3))
    tiny.assert_as_eager(call, model, [x], assert_near)


@pytest.mark.parametrize(
    ("state", "options", "error", "text"),
    [
        ({}, {}, OptionError, "no packed weight"),
        ("source", {"rank": 8}, OptionError, r"decides.*rank"),
        ("renamed", {}, ShapeError, r"does not have: other\.weight.*fc1\.weight"),
    ],
)
def test_tensorize_refuses_a_state_dict_that_does_not_fit(
    state: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    source = tensorized().state_dict()
    renamed = {name.replace("fc1", "other"): value for name, value in source.items()}
    state = {"source": source, "renamed": renamed}.get(state, state) if isinstance(state, str) else state
    model = tiny.Mlp().double()
    before = tiny.snapshot(model)
    with pytest.raises(error, match=text):
        comera.tensorize(model, state_dict=state, **options)
    tiny.assert_unchanged(before, model)


def test_loading_with_assign() -> None:
    # assign=True puts the checkpoint's tensors in place as new Parameters.
    source, target = tensorized(rank=3), tensorized()
    target.load_state_dict(source.state_dict(), assign=True)
    assert_equal_models(target, source)


def test_loading_leaves_a_frozen_copy_alone() -> None:
    # A reference model equal to the fresh one is not what is being loaded.
    model = tiny.double(tiny.Mlp())
    reference = copy.deepcopy(model).requires_grad_(False)
    before = tiny.snapshot(reference)
    model.load_state_dict(tensorized().state_dict())
    tiny.assert_unchanged(before, reference)


def test_an_average_that_has_averaged_nothing_takes_the_form(assert_near: Near) -> None:
    # Resume: model and AveragedModel are made, the model is loaded, training goes on.
    model = tiny.double(tiny.Mlp())
    average = torch.optim.swa_utils.AveragedModel(model)
    model.load_state_dict(tensorized().state_dict())
    average.update_parameters(model)
    assert_near(average(x := tiny.rows(3)), model(x))


def test_averaged_models_save_and_load(assert_near: Near) -> None:
    model = tensorized()
    source = torch.optim.swa_utils.AveragedModel(model)
    source.update_parameters(model)
    target = torch.optim.swa_utils.AveragedModel(tiny.double(tiny.Mlp()))
    target.load_state_dict(source.state_dict(), strict=True)
    assert_near(target(x := tiny.rows(3)), source(x))


def test_a_users_own_entry_with_the_same_suffix() -> None:
    # A buffer that happens to be called `<vector>_tt` is not a layout.
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))
            self.register_buffer("scale_tt", torch.randn(3))

    source, target = Other(), Other()
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target.scale_tt, source.scale_tt) and torch.equal(target.scale, source.scale)


def test_module_versions_reach_load_hooks() -> None:
    # `_metadata` tells modules from which version of theirs a state dict is; renaming keys must not lose it.
    seen = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def build() -> nn.Module:
        return nn.Sequential(Versioned(tiny.WIDTH, tiny.WIDTH))

    source, target = tensorized(build), tensorized(build)
    compiled(target).load_state_dict(source.state_dict())
    assert seen == [7]


def test_dense_values_that_look_untrained_are_kept_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    # A checkpoint's values are what was asked for: others of the same variance may not take their place.
    model = tensorized()
    state = {k: v.clone() for k, v in comera.dense_state_dict(model).items()}
    state["fc1.weight"] = torch.randn_like(state["fc1.weight"])
    model.load_state_dict(state)
    assert torch.equal(model.fc1.weight, state["fc1.weight"])
    assert any("fc1.weight was loaded dense and stays dense" in r.getMessage() for r in caplog.records)
