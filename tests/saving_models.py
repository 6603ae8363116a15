"""Tiny transformers for tests of what is saved, and a backend that shows the choice and the cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import comera_compile as comera
from benchmarks.six_encoders import SixEncoders, Sizes
from comera_compile import pipeline, torch_partition
from comera_compile.passes.choose_saved import Choice
from comera_compile.passes.tag_saved_tensors import Saved, tag_saved_tensors

WIDTH, TOKENS, WORDS = 32, 16, 60
TENSORIZE: dict[str, Any] = {"rank": 4, "order": 2, "min_elements": 500}
OPTIONS: dict[str, Any] = {**TENSORIZE, "inner": "aot_eager"}
SIZES = Sizes(width=WIDTH, hidden=128, heads=2, sequence=TOKENS, vocabulary=WORDS, encoders=2)


class Block(nn.Module):
    """Pre-norm decoder block: causal attention from one joint projection, then a feed-forward network."""

    def __init__(self, activation: Callable[[Tensor], Tensor], dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Token table, blocks, head; the loss of predicting the next token."""

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor] = F.silu,
        *,
        blocks: int = 2,
        dropout: float = 0.0,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(activation, dropout) for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Encoder(nn.Module):
    """The benchmark's post-norm encoder with GELU, tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SixEncoders(SIZES)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, ids[:, 0] % 3)
        return loss


def words(batch: int = 3, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, WORDS, (batch, tokens))


def packed(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with tensor-train weights; equal for equal seeds."""
    comera.tensorize(model.to(dtype), **TENSORIZE)
    return model


def gradients(call: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Loss and every gradient of one step without an update."""
    model.zero_grad()
    loss = call(*inputs)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@dataclass
class Cut:
    """One joint graph: what was chosen, the forward it was cut into, and the bytes that this forward saves."""

    choice: Choice
    forward: fx.GraphModule
    saved: int


class Watching:
    """A Dynamo backend that says what is saved, keeps what was chosen, and runs the graphs operation by operation."""

    def __init__(self, saved: Saved = "min", limit: int | None = None) -> None:
        self.saved, self.limit = saved, limit
        self.cuts: list[Cut] = []

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        pipeline.run(graph_module)
        return torch_partition.compile_eagerly(graph_module, inputs, _Recording(self))

    @property
    def cut(self) -> Cut:
        """The one joint graph there was."""
        (only,) = self.cuts
        return only


class _Recording(torch_partition.Partitioner):
    def __init__(self, watching: Watching) -> None:
        super().__init__("", self._tag)
        self.watching = watching
        self.chosen: list[Choice] = []

    def _tag(self, joint: fx.GraphModule, outputs: int) -> None:
        saved, limit = self.watching.saved, self.watching.limit
        self.chosen.append(tag_saved_tensors(joint, outputs, saved=saved, limit=limit))

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **settings: Any) -> torch_partition.Halves:
        halves = super().__call__(joint, joint_inputs, **settings)
        saved = torch_partition.saved_bytes(halves[0], settings["num_fwd_outputs"])
        self.watching.cuts.append(Cut(self.chosen[-1], halves[0], saved))
        return halves


def really_saved(loss: Tensor, model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of the unique storages that the autograd graph holds and that are neither inputs nor parameters.

    Bytes (uint8) are states of random generators, which torch saves where a checkpointed operation may draw numbers.
    """
    known = {t.untyped_storage().data_ptr() for t in (*inputs, *model.parameters(), *model.buffers())}
    assert loss.grad_fn is not None
    tensors = [t for t in loss.grad_fn.saved_tensors if t.dtype is not torch.uint8]
    saved = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in saved.items() if pointer not in known)
