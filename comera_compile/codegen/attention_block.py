"""Linear layers, attention between heads, and the output projection: narrow, then from bond to bond, then wide.

What is kept for the backward is x and the bonds: q, k, v, the scores and the mixed values never exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera_compile.codegen.apply_attend import Attend
from comera_compile.codegen.apply_bridge import Narrow, Wide
from comera_compile.codegen.apply_merged import has_kernels
from comera_compile.codegen.attention import attention_by_products
from comera_compile.codegen.contract import viewed
from comera_compile.codegen.cpu import attend_kernels, dropout_seed, skinny_kernels
from comera_compile.codegen.run_plan import apply_operands
from comera_compile.planning.attention_plan import pays_off
from comera_compile.planning.linear_plan import LinearPlan

# Columns of the parts of each projection; projection and part of q, k and v; whether the result has two axes only.
Form = tuple[Sequence[Sequence[int]], Sequence[tuple[int, int]], bool]


class _Layer(NamedTuple):
    text: str
    bias: Tensor | None
    operands: tuple[Tensor, Tensor]

    @property
    def plan(self) -> LinearPlan:
        return LinearPlan.decode(self.text)

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        return self.operands[::-1] if self.plan.contracts == "cols" else self.operands


class _Block(NamedTuple):
    """What a call is about: see :func:`apply_attention`; the last of ``layers`` is the output projection."""

    settings: attend_kernels.Settings
    dropout: float
    widths: Sequence[Sequence[int]]
    sides: Sequence[tuple[int, int]]
    rows: Sequence[Tensor]
    layers: Sequence[_Layer]
    mask: Tensor | None


def apply_attention(
    settings: attend_kernels.Settings,
    dropout: float,
    form: Form,
    texts: Sequence[str],
    rows: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    mask: Tensor | None,
    *operands: Tensor,
) -> Tensor:
    """y of an output projection whose x are the heads of scaled dot-product attention side by side.

    Args:
        settings: heads, heads of k and v, causal or not, factor of the scores.
        dropout: probability with which each weight of a key is dropped; torch's generator is asked for one number if it
            is not 0.
        form: how q, k and v lie in the results of the projections, and whether y has batch and tokens in one axis.
        texts: plans of the projections and the output projection, all with merged halves.
        rows: x of the projections, ``[batch, tokens, inputs]``.
        biases: of the layers, in the order of ``texts``.
        mask: as of ``F.scaled_dot_product_attention``, or None; it gets no gradient.
        operands: two a layer, in the order of ``texts``.

    Returns:
        ``[batch, tokens of q, outputs]``, or ``[batch * tokens, outputs]``.
    """
    pairs = zip(operands[::2], operands[1::2], strict=True)
    layers = [_Layer(*layer) for layer in zip(texts, biases, pairs, strict=True)]
    widths, sides, flat = form
    dim = widths[sides[0][0]][sides[0][1]] // settings[0]
    by_kernels = _has_kernels(rows, layers, dim)
    block = _Block(settings, dropout, widths, sides, rows, layers, mask)
    y = _by_kernels(block) if by_kernels else _one_by_one(block)
    first = rows[sides[0][0]].shape[:2]
    return viewed(y, [math.prod(first), y.shape[-1]] if flat else [*first, y.shape[-1]])


def _has_kernels(rows: Sequence[Tensor], layers: Sequence[_Layer], dim: int) -> bool:
    """Whether every layer has, as it would alone, attention too, and nothing is to be cast."""
    tensors = [*rows, *(t for layer in layers for t in (layer.bias, *layer.operands) if t is not None)]
    if torch.is_autocast_enabled(rows[0].device.type) or any(t.dtype != rows[0].dtype for t in tensors):
        return False
    alone = (has_kernels(layer.plan, x, layer.bias, layer.operands) for layer, x in zip(layers, [*rows, rows[0]]))  # noqa: B905
    return all(alone) and attend_kernels.available(rows[0], dim)


def _one_by_one(block: _Block) -> Tensor:
    """The same without operators for all of it: layers, and attention by torch or, if it is short, by products."""
    settings, dropout, widths, sides, rows, layers, mask = block
    heads, kv_heads, causal, scale = settings
    made = [
        apply_operands(layer.text, x, layer.bias, *layer.operands) for layer, x in zip(layers[:-1], rows, strict=True)
    ]
    parts = [y.split(list(columns), dim=-1) for y, columns in zip(made, widths, strict=True)]
    counts = heads, kv_heads, kv_heads
    q, k, v = (parts[i][j].unflatten(-1, (n, -1)).transpose(1, 2) for (i, j), n in zip(sides, counts, strict=True))
    short = pays_off(q.shape[2], k.shape[2], q.device.type) and q.dtype in skinny_kernels.ELEMENTS
    if short and mask is None and heads == kv_heads and scale > 0 and not dropout:
        mixed = attention_by_products(q, k, v, causal, scale)
    else:
        grouped = heads != kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return apply_operands(layers[-1].text, mixed.transpose(1, 2).flatten(2), layers[-1].bias, *layers[-1].operands)


def _by_kernels(block: _Block) -> Tensor:
    settings, dropout, widths, sides, rows, layers, mask = block
    *projections, last = layers
    bonds = _bonds(rows, [layer.halves[0] for layer in projections])
    seconds = [_parts(layer.halves[1], columns) for layer, columns in zip(projections, widths, strict=True)]
    biases = [_parts(layer.bias, columns) for layer, columns in zip(projections, widths, strict=True)]
    wide = [half for i, j in sides for half in (seconds[i][j], biases[i][j])]
    first, second = last.halves
    added = None if mask is None else _added(mask, rows[0].dtype)
    operands = *(bonds[i] for i, _ in sides), *wide, first, added
    seed = dropout_seed.draw(dropout, rows[0].device)
    h = Attend.apply(settings, dropout, seed, *operands)  # type: ignore[no-untyped-call]
    h = viewed(h, [math.prod(h.shape[:2]), h.shape[2]])
    y: Tensor = Wide.apply(h, second, last.bias)  # type: ignore[no-untyped-call]
    return y


def _bonds(rows: Sequence[Tensor], firsts: Sequence[Tensor]) -> list[Tensor]:
    """``x first^T`` of each, ``[batch, tokens, bond]``. Of one x it is one product: x is read, and dx written, once."""
    narrow: Any = Narrow.apply
    sizes = [first.shape[0] for first in firsts]
    shared = len(rows) > 1 and all(x is rows[0] for x in rows)
    if shared and skinny_kernels.available(rows[0], sum(sizes)):
        made = narrow(rows[0], torch.cat(list(firsts))).split(sizes, dim=1)
    else:
        made = [narrow(x, first) for x, first in zip(rows, firsts, strict=True)]
    return [viewed(h, [*x.shape[:-1], h.shape[1]]) for h, x in zip(made, rows, strict=True)]


def _parts(value: Tensor | None, columns: Sequence[int]) -> Sequence[Tensor | None]:
    return (value,) * len(columns) if value is None or len(columns) == 1 else value.split(list(columns), dim=-1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores for a mask: itself, or minus infinity where a mask of truth values says no."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask.logical_not(), -math.inf)
