"""Language models of the ``transformers`` package, random weights, through the one-line call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import comera_compile as comera
from comera_compile.weights.tt_module import base_class

WIDTH, VOCABULARY, TOKENS, STEPS = 64, 200, 16, 20
OPTIONS: dict[str, Any] = {"rank": 8, "order": 2, "min_elements": 1000, "inner": "aot_eager"}
TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}


def gpt2() -> nn.Module:
    """Conv1D layers (weights stored input by output) and a head tied to the embedding."""
    quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, **quiet, **TINY))


def bert() -> nn.Module:
    """Attention both ways, biases, a padding row in the embedding, a tied decoder with a bias."""
    quiet: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(hidden_size=WIDTH, max_position_embeddings=32, **quiet, **LAYERS, **TINY))


def llama(layers: int = 2) -> nn.Module:
    """Grouped queries, rotary positions, a gated MLP, an untied head."""
    sizes = LAYERS | {"hidden_size": WIDTH, "num_key_value_heads": 2, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, **TINY))


@dataclass(frozen=True)
class Run:
    """What 20 steps on one batch showed."""

    matrices: list[str]
    first: dict[str, Tensor]
    eager: dict[str, Tensor]
    losses: list[float]
    report: comera.Report
    model: nn.Module


def outcome(call: Callable[..., Any], model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Loss and every gradient of one step, which stays in ``.grad``."""
    model.zero_grad()
    loss: Tensor = call(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_same(ours: dict[str, Tensor], right: dict[str, Tensor], bar: float) -> None:
    """Errors within ``bar`` of each value's norm; a gradient that is zero but for rounding counts by the largest one.

    The bias of a key projection is such: the same number added to all scores changes nothing.
    """
    assert ours.keys() == right.keys()
    largest = max(float(v.norm()) for v in right.values())
    for name, value in right.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype, name
        error, scale = float((ours[name] - value).norm()), max(float(value.norm()), 1e-3 * largest)
        assert error <= bar * scale, f"{name}: relative error {error / scale:.2e} above {bar:.0e}"


def train(make: Callable[[], nn.Module], **options: Any) -> Run:
    """The README's loop; the eager twin is a deep copy of the model that the first call has packed."""
    torch.manual_seed(0)
    model, ids = make(), torch.randint(2, VOCABULARY, (4, TOKENS))
    matrices = [name for name, p in model.named_parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    call = torch.compile(model, backend="comera", options=OPTIONS | options)
    first = outcome(call, model, ids)
    twin = copy.deepcopy(model)
    eager = outcome(twin, twin, ids)
    losses = [float(first["loss"])]
    for _ in range(STEPS - 1):
        optimizer.step()
        losses.append(float(outcome(call, model, ids)["loss"]))
    return Run(matrices, first, eager, losses, comera.report(model), model)


@pytest.fixture(scope="module", params=[gpt2, bert, llama], ids=lambda make: make.__name__)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """One training run a model, looked at by several tests."""
    yield train(request.param)
    torch._dynamo.reset()


def test_the_first_step_equals_eager(run: Run) -> None:
    # Nine to sixteen weights a model, every one with its own plan, forward and backward.
    assert_same(run.first, run.eager, 1e-5)


def test_a_batch_is_memorised(run: Run) -> None:
    # From log(vocabulary): the packed weights train at the dense model's learning rate.
    assert abs(run.losses[0] - torch.tensor(VOCABULARY).log()) < 0.5
    assert run.losses[-1] < 0.5 * run.losses[0]


def test_every_matrix_is_reported(run: Run) -> None:
    # By the model's own names, tied ones once; all but a table of two rows are converted, with a plan for 64 rows.
    assert [line.decision.name for line in run.report.lines] == run.matrices
    dense = [line.decision.name for line in run.report.lines if line.decision.shape is None]
    assert dense == [name for name in run.matrices if "token_type" in name]
    for line in run.report.tensorized:
        positions = "position" in line.decision.name or "wpe" in line.decision.name
        assert line.uses[0].rows == str(TOKENS if positions else 4 * TOKENS), line.decision.name
    assert run.report.numel < run.report.dense_numel / 2


def test_conv1d_keeps_its_orientation() -> None:
    # transformers stores these (inputs, outputs): modes of the rows multiply to the inputs.
    model = comera.tensorize(gpt2(), **{k: OPTIONS[k] for k in ("rank", "order", "min_elements")})
    layers = {name: m for name, m in model.named_modules() if base_class(m) is Conv1D}
    assert len(layers) == 8
    shape = comera.report(model)["transformer.h.0.attn.c_attn.weight"].decision.shape
    assert shape is not None and (shape.rows, shape.cols) == (WIDTH, 3 * WIDTH)


def test_a_tied_head_stays_tied() -> None:
    # transformers reads lm_head.weight in tie_weights, save_pretrained and resize_token_embeddings.
    model = comera.tensorize(gpt2(), **{k: OPTIONS[k] for k in ("rank", "order", "min_elements")})
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head._parameters["weight"] is table._parameters["weight"]
    assert torch.equal(head.weight, table.weight)
    assert [n for n in comera.dense_state_dict(model) if n.endswith("_tt")] == []


@pytest.mark.slow
def test_through_inductor() -> None:
    # Generated C++ sums in another order than eager kernels.
    run = train(gpt2, inner="inductor")
    assert_same(run.first, run.eager, 1e-4)
    assert run.losses[-1] < 0.5 * run.losses[0]


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_llama_in_bfloat16(kind: str) -> None:
    # Mixed dtypes in one product are what stopped others. Both sides round to bfloat16, at other places: ours must be
    # about as near to the exact result as eager is.
    model, ids = llama(layers=1), torch.randint(2, VOCABULARY, (4, TOKENS))
    if kind == "weights":
        model.to(torch.bfloat16)
    context: Callable[[], AbstractContextManager[object]] = autocast if kind == "autocast" else nullcontext
    call = torch.compile(model, backend="comera", options=OPTIONS)
    with context():
        ours = outcome(call, model, ids)
        twin = copy.deepcopy(model)
        eager = outcome(twin, twin, ids)
    exact_model = copy.deepcopy(model).float()
    exact = outcome(exact_model, exact_model, ids)
    assert len(comera.report(model).tensorized) == 9
    assert ours.keys() == eager.keys() == exact.keys()
    for name, right in exact.items():
        assert ours[name].dtype == eager[name].dtype, name
        bar = 2 * (eager[name].float() - right).norm() + 0.02 * right.norm()
        assert (ours[name].float() - right).norm() <= bar, name


def test_llama_with_mixed_dtypes_fails_as_in_eager() -> None:
    # bfloat16 weights, float32 embeddings handed in: eager refuses, and nothing may be cast behind the user's back.
    model, x = llama(layers=1).to(torch.bfloat16), torch.randn(2, TOKENS, WIDTH)
    with pytest.raises(RuntimeError, match="dtype"):
        model(inputs_embeds=x)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.compile(model, backend="comera", options=OPTIONS)(inputs_embeds=x)
