"""What is saved between forward and backward: the same gradients, fewer bytes, and exactly as many as predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import comera_compile as comera
from comera_compile import torch_partition
from comera_compile.passes.choose_saved import Choice
from comera_compile.passes.joint_graph import read_joint_graph
from comera_compile.passes.order_backward import order_backward
from comera_compile.planning.common_ranges import MOST_RANGES
from tests import saving_models as tiny
from tests.packed_modules import Capture
from tests.saving_models import OPTIONS, Encoder, Gpt, Watching, gradients, packed, really_saved, words

MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "gpt, relu": lambda: Gpt(F.relu),
    "gpt, silu": lambda: Gpt(F.silu),
    "gpt, gelu": lambda: Gpt(F.gelu),
    "gpt, checkpointed": lambda: Gpt(F.silu, checkpointed=True),
    "gpt, dropout": lambda: Gpt(F.silu, dropout=0.4),
    "gpt, dropout and checkpointed": lambda: Gpt(F.silu, dropout=0.4, checkpointed=True),
}
SOME = ("encoder", "gpt, dropout and checkpointed")
BACKENDS: dict[str, dict[str, Any]] = {"min": {"saved": "min"}, "limited": {"saved_bytes": 220_000}, "auto": {}}


def step(model: nn.Module, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    """Loss and gradients of a compiled step; the random numbers of dropout are the same each time."""
    torch._dynamo.reset()
    call = torch.compile(model, backend="comera", options=OPTIONS | options)
    torch.manual_seed(1)
    return gradients(call, model, ids)


def assert_equal(found: dict[str, Tensor], right: dict[str, Tensor], bar: float) -> None:
    """Relative to each gradient, but to a millionth of the largest where one is zero, such as that of a key's bias."""
    assert found.keys() == right.keys()
    floor = 1e-6 * max(float(value.norm()) for value in right.values())
    for name, value in right.items():
        assert (found[name] - value).norm() <= bar * max(float(value.norm()), floor), name


def observed(model: nn.Module, ids: Tensor, **settings: Any) -> tuple[Watching, Tensor]:
    """A packed model compiled with a backend that shows what is saved, and its loss."""
    watching = Watching(**settings)
    loss: Tensor = torch.compile(model, backend=watching)(ids)
    return watching, loss


# -- the same gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, "min") for kind in MODELS] + [(kind, b) for kind in SOME for b in BACKENDS if b != "min"],
)
def test_gradients_do_not_depend_on_what_is_saved(kind: str, backend: str) -> None:
    # The same operations on the same numbers, only later. Dropout: a mask drawn twice would be another mask.
    model, ids = packed(MODELS[kind]()), words()
    assert_equal(step(model, ids, **BACKENDS[backend]), step(model, ids, saved="all"), 1e-12)


def test_gradients_are_those_of_eager_code() -> None:
    model, ids = packed(Encoder()), words()
    twin = copy.deepcopy(model)
    assert_equal(step(model, ids, saved="min"), gradients(twin, twin, ids), 1e-10)


def test_in_float32() -> None:
    model, ids = packed(Encoder(), torch.float32), words()
    assert_equal(step(model, ids, saved="min"), step(model, ids, saved="all"), 1e-6)


def test_under_autocast() -> None:
    # Casts are made again too; in eager operations nothing is rounded differently for it.
    model, ids = packed(Gpt(), torch.float32), words()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(step(model, ids, saved="min"), step(model, ids, saved="all"), 1e-6)


@pytest.mark.slow
def test_a_dynamic_batch_is_not_compiled_more_often() -> None:
    # Sizes are only looked at as hints: a guard on one would compile every batch anew.
    model = packed(Gpt())
    twin, watching, plain = copy.deepcopy(model), Watching(), Capture()
    call, other = torch.compile(model, backend=watching, dynamic=True), plain.compile(twin, dynamic=True)
    for batch in (3, 5, 4, 9, 7):
        ids = words(batch)
        assert_equal(gradients(call, model, ids), gradients(other, twin, ids), 1e-10)
    assert len(watching.cuts) == len(plain.graphs) <= MOST_RANGES  # by ranges of rows, as always


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_without_training(mode: str) -> None:
    model, ids = packed(Gpt()), words()
    model.train(mode != "eval")
    with torch.set_grad_enabled(mode == "eval"):
        found = torch.compile(model, backend="comera", options=OPTIONS | {"saved": "min", "saved_bytes": 10**9})(ids)
        right = model(ids)
    assert (found - right).abs() <= 1e-12 * right.abs()


def test_a_buffer_that_the_forward_overwrites_is_not_read_again() -> None:
    # x * old is cheap to make again, but by then the buffer holds another value.
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(tiny.WIDTH, 4 * tiny.WIDTH)
            self.register_buffer("seen", torch.ones(4 * tiny.WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            factor = self.seen.exp()
            y = (self.fc(x) * factor).tanh()
            self.seen.add_(1.0)
            return y.square().mean()

    model = packed(Counting())
    x = torch.randn(64, tiny.WIDTH, dtype=torch.float64)
    twin = copy.deepcopy(model)
    call = torch.compile(model, backend="comera", options=OPTIONS | {"saved": "min"})
    assert_equal(gradients(call, model, x), gradients(twin, twin, x), 1e-12)


@pytest.mark.parametrize("kind", ["encoder", "gpt, silu"])
def test_with_inductor(kind: str) -> None:
    # Generated code fuses what is made again with what follows, which rounds differently in the last place.
    model, ids = packed(MODELS[kind]()), words()
    found = step(model, ids, inner="inductor", saved="min")
    assert_equal(found, step(model, ids, saved="all"), 1e-12)


# -- fewer bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dynamic"), [(kind, False) for kind in MODELS] + [(kind, True) for kind in SOME])
def test_what_is_predicted_is_saved(kind: str, dynamic: bool) -> None:
    # Predicted on the joint graph; counted on the forward graph; held by autograd when the forward has run.
    model, ids = packed(MODELS[kind]()), words()
    watching = Watching()
    loss = torch.compile(model, backend=watching, dynamic=dynamic)(ids)
    cut = watching.cut
    assert cut.choice.bytes == cut.saved == really_saved(loss, model, ids)


@pytest.mark.parametrize("kind", ["encoder", "gpt, silu"])
def test_saves_much_less_than_torch(kind: str) -> None:
    model, ids = packed(MODELS[kind]()), words()
    watching, _ = observed(model, ids)
    torch._dynamo.reset()
    loss = torch.compile(model, backend="comera", options=OPTIONS | {"saved": "all"})(ids)
    # A feed-forward block that runs from bond to bond saves nothing wide with either.
    assert 3 * watching.cut.saved < 2 * really_saved(loss, model, ids)


class Wide(nn.Module):
    """Feed-forward networks, 192 -> 384 -> 192 with a norm and GELU in the middle: wide enough to keep their bonds."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(192, 384) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(384, 192) for _ in range(count))
        self.norm = nn.LayerNorm(384)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(F.gelu(self.norm(up(x))))
        return x.square().mean()


def wide(choice: Choice) -> list[fx.Node]:
    """What is saved of 192 or 384 columns."""
    return [n for n in choice.saved if tuple(n.meta["val"].shape) in ((512, 192), (512, 384))]


def test_behind_a_tensor_train_layer_only_its_bond_is_saved() -> None:
    # A limit makes it rebuild output, norm and activation of all three, rows x 384, and the outputs, from rows x 8, the
    # bond of 4 with its padding.
    x = torch.randn(512, 192, dtype=torch.float64)
    model = packed(Wide(3))
    choice = observed(model, x, saved="auto", limit=smallest(model, x))[0].cut.choice
    assert not wide(choice)
    assert sum(tuple(n.meta["val"].shape) == (512, 8) for n in choice.saved) >= 1


def test_what_the_backward_reads_first_is_saved() -> None:
    # When the backward gets to the last network, everything else is still there: its wide tensors are part of the peak
    # whether saved or rebuilt. Those of the others are not.
    x = torch.randn(512, 192, dtype=torch.float64)
    one, four = (observed(packed(Wide(count)), x)[0].cut.choice for count in (1, 4))
    assert 1 <= len(wide(one)) == len(wide(four)) <= 2


def test_random_and_opaque_operations_run_once() -> None:
    # Attention over more tokens than are planned stays torch's op, tagged random: made again, it would drag states of
    # the random generator along. So would dropout; the table lookup is opaque.
    model, ids = packed(Gpt(dropout=0.3, blocks=1)), words(2, 200)
    watching, _ = observed(model, ids)
    again = {str(n.target) for n in watching.cut.choice.again}
    assert any("comera.wide" in name for name in again)
    assert not [n for n in again if "attention" in n or "dropout" in n or "rand" in n or "lookup" in n]
    (output,) = watching.cut.forward.graph.find_nodes(op="output")
    assert all(n.meta["val"].dtype != torch.uint8 for n in output.args[0] if "val" in n.meta)


@pytest.mark.slow
def test_a_long_chain_keeps_some_of_its_links() -> None:
    # 16 blocks are one residual stream of 32 sums; rebuilt whole it would all live at once in the backward. However low
    # the limit, every few links stay.
    model, ids = packed(Gpt(blocks=16)), words(16)
    choice = observed(model, ids, saved="auto", limit=smallest(model, ids))[0].cut.choice
    assert 3 <= sum(n.target is torch.ops.aten.add.Tensor for n in choice.saved) <= 16, choice.saved


def test_gradients_of_weights_are_taken_first() -> None:
    # x (512 rows) is read by dW = x' dy and dropped before dx is made; without the pass, dx comes first. The values are
    # those of the other order.
    order: dict[bool, list[str]] = {}

    class Order(torch_partition.Partitioner):
        def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> torch_partition.Halves:
            torch_partition.merge_equal_nodes(joint)
            read = read_joint_graph(joint.graph, settings["num_fwd_outputs"])
            for done in (False, True):
                mms = [n for n in joint.graph.nodes if n.target is torch.ops.aten.mm.default and n in read.backward]
                order[done] = ["dx" if n.meta["val"].shape[0] == 512 else "dW" for n in mms]
                order_backward(joint, read)
            return min_cut_rematerialization_partition(joint, joint_inputs, **settings)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_partition.compile_eagerly(graph_module, inputs, Order("", lambda *_: None))

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x.mm(weight)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            dx = grads[0].mm(weight.t())
            return dx, x.t().mm(grads[0])

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return Product.apply(x.sin(), weight).square().mean()  # type: ignore[no-untyped-call,no-any-return]

    leaves = [torch.randn(512, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    found = torch.autograd.grad(torch.compile(function, backend=backend)(*leaves), leaves)
    right = torch.autograd.grad(function(*leaves), leaves)
    assert order == {False: ["dx", "dW"], True: ["dW", "dx"]}
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_a_layer_used_twice_beside_an_equal_one() -> None:
    # Its weight gradients share views of the merged operands; moved ahead for one they must not move on for the other.
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = (nn.Linear(tiny.WIDTH, 48) for _ in range(2))
            self.last = nn.Linear(48, tiny.WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return (self.last(F.gelu(self.first(x))) + self.last(self.again(x))).square().mean()

    model, x = packed(Twice()), torch.randn(600, tiny.WIDTH, dtype=torch.float64)
    twin = copy.deepcopy(model)
    for backend in BACKENDS.values():
        limit = {"saved_bytes": 10**6} if "saved_bytes" in backend else backend
        assert_equal(step(model, x, **limit), gradients(twin, twin, x), 1e-12)


# -- a limit ---------------------------------------------------------------------------------------------------------


def smallest(model: nn.Module, inputs: Tensor, **options: Any) -> int:
    """The limit that the refusal of an impossible one names."""
    torch._dynamo.reset()
    with pytest.raises(comera.CompileError, match=r"saved_bytes=64 cannot be met.* at least \d+ bytes") as caught:
        torch.compile(model, backend="comera", options=OPTIONS | options | {"saved_bytes": 64})(inputs)
    torch._dynamo.reset()
    return int(str(caught.value).split("at least ")[1].split()[0])


def test_a_smaller_limit_never_saves_more() -> None:
    model, ids = packed(Encoder()), words()
    low = smallest(model, ids)
    high = observed(model, ids, saved="auto")[0].cut.saved
    sizes, again = list[int](), list[int]()
    for share in range(8, -1, -1):
        limit = low + (high - low) * share // 8
        torch._dynamo.reset()
        watching, loss = observed(model, ids, saved="auto", limit=limit)
        assert really_saved(loss, model, ids) == watching.cut.saved == watching.cut.choice.bytes <= limit
        sizes.append(watching.cut.saved)
        again.append(len(watching.cut.choice.again))
    assert sizes == sorted(sizes, reverse=True) and again == sorted(again)
    assert sizes[0] == high and sizes[-1] == low and len(set(sizes)) >= 5  # fine enough to come near a limit


def test_a_limit_that_is_kept_anyway_changes_nothing() -> None:
    model, ids = packed(Encoder()), words()
    for saved in ("auto", "min"):
        sizes = []
        for limit in ({}, {"saved_bytes": 10**9}):
            torch._dynamo.reset()
            loss = torch.compile(model, backend="comera", options=OPTIONS | {"saved": saved} | limit)(ids)
            sizes.append(really_saved(loss, model, ids))
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("saved", ["auto", "min"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_an_impossible_limit_names_the_smallest(saved: str, inner: str) -> None:
    # That limit can be met, one byte less cannot.
    model, ids = packed(Gpt(blocks=1)), words()
    options = {"saved": saved, "inner": inner}
    limit = smallest(model, ids, **options)
    loss = torch.compile(model, backend="comera", options=OPTIONS | options | {"saved_bytes": limit})(ids)
    assert really_saved(loss, model, ids) == limit
    torch._dynamo.reset()
    with pytest.raises(comera.CompileError, match=f"at least {limit} bytes"):
        torch.compile(model, backend="comera", options=OPTIONS | options | {"saved_bytes": limit - 1})(ids)
