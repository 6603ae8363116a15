"""What a user can get wrong: each message names the thing, what was expected and got, and what to do.

A refused call leaves the model as it was, bit for bit: nobody has to load it again.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import comera_compile as comera
from comera_compile import torch_private
from comera_compile.errors import CompileError, OptionError, PlacementError, ShapeError, VersionError, WeightError
from tests import tiny_models as tiny

Near = Callable[..., None]
ROOT = Path(__file__).resolve().parents[1]

OPTION_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"rnk": 8}, r"unknown option 'rnk' \(did you mean 'rank'\?\); known: rank, modes, order, layers"),
    "rank 0": ({"rank": 0}, r"rank must be a positive int, a fraction between 0 and 1, or a list.*got 0"),
    "rank -1": ({"rank": -1}, r"rank must be .*got -1"),
    "rank 2.5": ({"rank": 2.5}, r"rank must be .*got 2\.5"),
    "rank of a string": ({"rank": "8"}, r"rank must be .*got '8'"),
    "rank True": ({"rank": True}, r"rank must be .*got True"),
    "rank list with 0": ({"rank": [8, 0]}, r"rank must be .*got \[8, 0\]"),
    "empty rank list": ({"rank": []}, r"rank must be .*got \[\]"),
    "order 0": ({"order": 0}, r"order must be an int from 1 to 6, got 0"),
    "order 7": ({"order": 7}, r"order must be an int from 1 to 6, got 7"),
    "modes of one side": ({"modes": (6, 8)}, r"modes must be a pair of lists.*got \(6, 8\)"),
    "init": ({"init": "xavier"}, r"init must be one of 'auto', 'svd', 'random', got 'xavier'"),
    "max_error": ({"max_error": 1.5}, r"max_error must be a number from 0 to 1, got 1\.5"),
    "tolerance": ({"tolerance": -0.1}, r"tolerance must be a number from 0 to 1, got -0\.1"),
    "include": ({"include": 3}, r"include must be a name pattern or a list of them, got 3"),
    "min_elements": ({"min_elements": -5}, r"min_elements must be an int of at least 0, got -5"),
    "strict": ({"strict": "yes"}, r"strict must be True or False, got 'yes'"),
    "layers": ({"layers": ["fc1"]}, r"layers must be a dict, got \['fc1'\]"),
    "unknown name in layers": ({"layers": {"fc1": {"rnk": 8}}}, r"layers\['fc1'\]: unknown option 'rnk'; known: rank"),
    "bad value in layers": ({"layers": {"fc1": {"rank": 0}}}, r"layers\['fc1'\]: rank must be .*got 0"),
    "layers of a number": ({"layers": {3: {"rank": 8}}}, r"a key of layers must be a name pattern .*got 3"),
    "settings in layers": ({"layers": {"fc1": 8}}, r"layers\['fc1'\] must be a dict of rank, modes, .*got 8"),
    "modes in layers": ({"layers": {"fc1": {"modes": (6, 8)}}}, r"layers\['fc1'\]: modes must be a pair of lists"),
    "modes that are no ints": (
        {"layers": {"fc1": {"modes": ((6, 8.0), (4, 8))}}},
        r"layers\['fc1'\]: modes must be .*positive ints.*8\.0",
    ),
    "modes of bools": ({"modes": ((True, 48), (4, 8))}, r"modes must be .*positive ints.*got \(\(True, 48\)"),
    "a pattern that is no text": ({"exclude": ["fc1", None]}, r"exclude must be a name pattern or a list.*None"),
    "objective": ({"objective": "speed"}, r"objective must be one of 'time', 'flops', 'bytes', got 'speed'"),
    "saved": ({"saved": "some"}, r"saved must be one of 'auto', 'all', 'min', got 'some'"),
    "bytes with a unit": ({"saved_bytes": "100MB"}, r"saved_bytes must be a number of bytes, .*got '100MB'"),
    "inner": ({"inner": "inducter"}, r"inner must be one of .*'inductor'.*got 'inducter'"),
    "inner is comera": ({"inner": "comera"}, r"inner must be one of .*got 'comera'"),
}

MODEL_ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "boundary ranks given": ({"rank": [1, 4, 4, 4, 1]}, ShapeError, r"fc\d\.weight.*need 3 inner ranks, got \[1, 4, 4"),
    "rank list of the wrong length": ({"rank": [8]}, ShapeError, r"fc\d\.weight.*need 3 inner ranks, got \[8\]"),
    "modes of the wrong product": (
        {"layers": {"fc1": {"modes": ((6, 7), (4, 8))}}},
        ShapeError,
        r"fc1\.weight.*\(6, 7\).*48",
    ),
    "layers matches nothing": (
        {"layers": {"fc9": {"rank": 8}}},
        OptionError,
        r"layers: pattern 'fc9' matches no weight; there are, e\.g\., .*fc1\.weight",
    ),
    "include matches nothing": (
        {"include": ["attention.*"]},
        OptionError,
        r"include: pattern 'attention\.\*' matches no",
    ),
    "exclude matches nothing": ({"exclude": "head"}, OptionError, r"exclude: pattern 'head' matches no weight"),
}


def compile_with(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    call: Callable[..., Tensor] = torch.compile(model, backend="comera", options=tiny.OPTIONS | options)
    return call


def tensorize_with(model: nn.Module, **options: Any) -> None:
    comera.tensorize(model, **tiny.TENSORIZE | options)


@pytest.mark.parametrize("case", list(OPTION_ERRORS))
def test_options_are_checked_before_anything_else(case: str) -> None:
    # By comera.Backend when it is made, by tensorize, and by name at the first call, unwrapped.
    options, text = OPTION_ERRORS[case]
    model = tiny.Mlp()
    before = tiny.snapshot(model)
    with pytest.raises(OptionError, match=text):
        comera.Backend(**options)
    with pytest.raises(OptionError, match=text):
        comera.tensorize(model, **options)
    with pytest.raises(OptionError, match=text):
        torch.compile(model, backend="comera", options=options)(tiny.rows(2, dtype=torch.float32))
    tiny.assert_unchanged(before, model)


@pytest.mark.parametrize("case", list(MODEL_ERRORS))
@pytest.mark.parametrize("way", ["compile", "tensorize"])
def test_options_that_do_not_fit_the_model(case: str, way: str) -> None:
    options, error, text = MODEL_ERRORS[case]
    model = tiny.Mlp()
    before = tiny.snapshot(model)
    with pytest.raises(error, match=text):
        if way == "compile":
            compile_with(model, **options)(tiny.rows(2, dtype=torch.float32))
        else:
            tensorize_with(model, **options)
    tiny.assert_unchanged(before, model)
    # The message was the remedy: with it the same model works.
    compile_with(model)(tiny.rows(2, dtype=torch.float32))
    assert len(tiny.packed_names(model)) == 2


def test_a_mode_is_refused_with_the_options_to_use() -> None:
    # torch hands `mode` to the backend; what a mode would give goes through options here.
    with pytest.raises(OptionError, match=r"mode='reduce-overhead' is not known; use options=\{'cudagraphs'"):
        torch.compile(tiny.Mlp(), backend="comera", mode="reduce-overhead")(tiny.rows(2, dtype=torch.float32))


def test_a_wrong_backend_name_lists_the_right_one() -> None:
    # Torch's own error, at once; the entry point makes the name known without an import.
    with pytest.raises(RuntimeError, match="CoMERA"):
        torch.compile(tiny.Mlp(), backend="CoMERA")
    assert "comera" in torch.compiler.list_backends()


def test_the_error_is_not_wrapped_and_keeps_its_class() -> None:
    # Users catch OptionError or ValueError; a BackendCompilerFailed would hide which.
    with pytest.raises(ValueError, match="unknown option") as caught:
        torch.compile(tiny.Mlp(), backend="comera", options={"rnk": 1})(tiny.rows(2, dtype=torch.float32))
    assert type(caught.value).__name__ == "OptionError"
    assert not isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)


def test_tensorize_of_something_else() -> None:
    with pytest.raises(OptionError, match=r"expects an nn\.Module, got list"):
        comera.tensorize([tiny.Mlp()])  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [tiny.Mlp, tiny.Broken])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_with_nan_is_refused_by_name(model: Callable[[], nn.Module], value: float) -> None:
    # Also when it is in the second half of a model cut by a graph break: the first half is not converted either.
    built = model()
    with torch.no_grad():
        built.fc2.weight[3, 5] = value
    before = tiny.snapshot(built)
    with pytest.raises(WeightError, match=r"fc2\.weight holds NaN or infinity; mend the weight, or exclude it"):
        compile_with(built)(tiny.rows(2, dtype=torch.float32))
    tiny.assert_unchanged(before, built)
    compile_with(built, exclude=["fc2"])(tiny.rows(2, dtype=torch.float32))
    assert tiny.packed_names(built) == ["fc1.weight"]


def test_a_model_without_eligible_layers_runs_with_a_notice(
    caplog: pytest.LogCaptureFixture, assert_near: Near
) -> None:
    # One warning that says why, then the same result as the inner backend gives.
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6, 2))
    x = torch.randn(4, 3, 8)
    call = compile_with(model, min_elements=100_000)
    with caplog.at_level(logging.WARNING, "comera_compile"):
        assert_near(call(x), torch.compile(model, backend="aot_eager")(x))
        call(x)
        call(torch.randn(5, 3, 8))
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1 and "no weight became a tensor train" in messages[0]
    assert "0.weight: 3-dimensional" in messages[0] and "2.weight: 96 elements are fewer than min_el" in messages[0]
    assert "backend='aot_eager'" in messages[0]


def test_the_notice_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    # A parameter of a module nobody knows is looked at again in every graph, since its use may still show.
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(tiny.WIDTH, tiny.WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first[0]
            torch._dynamo.graph_break()
            return x * self.second[1]

    with caplog.at_level(logging.WARNING, "comera_compile"):
        compile_with(Own())(tiny.rows(2, dtype=torch.float32))
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == ["comera: no weight became a tensor train"]


def test_strict_refuses_a_model_without_eligible_layers() -> None:
    model = tiny.Mlp()
    before = tiny.snapshot(model)
    with pytest.raises(CompileError, match=r"no weight became a tensor train.*fewer than min_elements.*strict=False"):
        compile_with(model, min_elements=100_000, strict=True)(tiny.rows(2, dtype=torch.float32))
    tiny.assert_unchanged(before, model)


@pytest.mark.parametrize("way", ["compile", "tensorize"])
def test_an_eager_loss_still_alive_is_refused(way: str, assert_near: Near) -> None:
    # Its backward would give a dense gradient to a packed weight. Once it has run, or is gone, all is well.
    model, x = tiny.double(tiny.Mlp()), tiny.rows(2)
    loss = model(x).pow(2).mean()
    before = tiny.snapshot(model)
    with pytest.raises(PlacementError, match=r"fc1\.weight is part of an autograd graph.*Delete that loss or output"):
        compile_with(model)(x) if way == "compile" else tensorize_with(model)
    tiny.assert_unchanged(before, model)
    loss.backward()
    del loss
    call = compile_with(model)
    call(x)
    tiny.assert_as_eager(call, model, [x], assert_near)


def test_an_eager_graph_nobody_can_reach_is_no_obstacle() -> None:
    # Outputs caught in a cycle of references are garbage that has not been collected yet.
    model, x = tiny.Mlp(), tiny.rows(2, dtype=torch.float32)
    gc.disable()
    try:
        holder: dict[str, Any] = {"output": model(x)}
        holder["self"] = holder
        del holder
        tensorize_with(model)
    finally:
        gc.enable()
    assert len(tiny.packed_names(model)) == 2


def test_no_cpp_compiler() -> None:
    # Said before the weights are touched, with the remedy.
    script = (
        "import torch, comera_compile as comera; from tests import tiny_models as tiny; model = tiny.Mlp();\n"
        "before = tiny.snapshot(model)\n"
        "call = torch.compile(model, backend='comera', options=tiny.OPTIONS | {'inner': 'inductor'})\n"
        "try: call(tiny.rows(2, dtype=torch.float32))\n"
        "except comera.CompileError as error: print(error)\n"
        "tiny.assert_unchanged(before, model); print('unchanged')\n"
    )
    environment = os.environ | {"CXX": "/nowhere/g++", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "needs a C++ compiler" in result.stdout and "/nowhere/g++" in result.stdout and "set CXX" in result.stdout
    assert result.stdout.endswith("unchanged\n")


def test_an_unsupported_torch() -> None:
    for version in ("2.4.0", "2.10.1+cu128", "1.13"):
        with pytest.raises(
            VersionError, match=rf"needs torch >= 2\.11, found {version.split('+')[0]}.*install a newer"
        ):
            torch_private.check_version(version)
    for version in ("2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0"):
        torch_private.check_version(version)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["compile wrapper", "compile model", "tensorize"])
def test_ddp_before_tensorizing_is_refused(one_process: None, way: str) -> None:
    # DDP has recorded bucket sizes of the dense weights.
    model = tiny.Mlp()
    wrapper = DistributedDataParallel(model)
    before, x = tiny.snapshot(model), tiny.rows(2, dtype=torch.float32)
    with pytest.raises(
        PlacementError, match=r"fc1\.weight is already wrapped by Dist.*comera\.tensorize\(model\) before"
    ):
        if way == "tensorize":
            tensorize_with(model)
        else:
            compile_with(wrapper if way == "compile wrapper" else model)(x)
    tiny.assert_unchanged(before, model)
    wrapper(x).sum().backward()


@pytest.mark.parametrize("order", ["compile(DDP)", "DDP(compile)"])
def test_ddp_after_tensorizing(one_process: None, order: str, assert_near: Near) -> None:
    # Gradients are reduced in packed form; one process gives what no DDP gives.
    model, x = tiny.double(tiny.Mlp()), tiny.rows(4)
    tensorize_with(model)
    if order == "compile(DDP)":
        call = compile_with(DistributedDataParallel(model))
    else:
        call = DistributedDataParallel(compile_with(model))
    for _ in range(2):
        tiny.assert_as_eager(call, model, [x], assert_near)


def test_fsdp_before_tensorizing_is_refused(one_process: None) -> None:
    model = tiny.Mlp()
    for part in (model.fc1, model.fc2, model):
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (1,)))
    classes = [type(m) for m in model.modules()]
    for way in (tensorize_with, lambda m: compile_with(m)(tiny.rows(2, dtype=torch.float32))):
        with pytest.raises(
            PlacementError, match=r"fc1\.weight is already (wrapped|sharded).*comera\.tensorize\(model\) b"
        ):
            way(model)
    assert classes == [type(m) for m in model.modules()]
    assert all(p.dim() == 2 for n, p in model.named_parameters() if n.startswith("fc") and n.endswith("weight"))


def test_fsdp_after_tensorizing(one_process: None, assert_near: Near) -> None:
    # Packed vectors are sharded like any parameter; eager and compiled give the unsharded result.
    model, x = tiny.double(tiny.Mlp()), tiny.rows(4)
    tensorize_with(model)
    expected = model(x).detach()
    for part in (model.fc1, model.fc2, model):
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (1,)))
    assert_near(model(x).detach(), expected)
    output = compile_with(model)(x)
    assert_near(output.detach(), expected)
    output.sum().backward()
    assert model.fc1._parameters["weight"].grad is not None


def test_strict_refuses_an_unplanned_use_and_leaves_the_model_dense():
    attention = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    before = {name: p.detach().clone() for name, p in attention.named_parameters()}
    options = {"rank": 4, "min_elements": 1000, "inner": "aot_eager", "strict": True}
    compiled = torch.compile(attention, backend="comera", options=options)
    # multi-head attention would rebuild its input projection densely in every call
    with pytest.raises(CompileError, match=r"in_proj_weight .*multi_head_attention.*exclude"):
        compiled(torch.randn(2, 5, 64))
    after = dict(attention.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_patch_that_inductor_does_not_know_is_refused_before_anything_is_changed() -> None:
    model, x = tiny.Mlp(), torch.randn(6, tiny.WIDTH)
    before = {name: p.clone() for name, p in model.named_parameters()}
    options = tiny.TENSORIZE | {"inner_options": {"max_autotun": True}}
    with pytest.raises(OptionError, match=r"inner_options: Inductor .* no option 'max_autotun'; close: 'max_autotune'"):
        torch.compile(model, backend="comera", options=options)(x)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_compiled_loss_that_is_still_there_keeps_the_weights_as_they_are() -> None:
    model, x = tiny.Mlp(), torch.randn(6, tiny.WIDTH)
    compiled = torch.compile(model, backend="comera", options=tiny.OPTIONS)
    loss = compiled(x).square().mean()
    loss.backward()
    with pytest.raises(PlacementError, match=r"a loss or output of an earlier step .* \(del loss, output"):
        comera.densify(compiled)
    del loss
    comera.densify(compiled)
    assert model.fc1.weight.shape == (48, 32)
