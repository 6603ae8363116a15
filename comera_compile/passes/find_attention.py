"""Pass 4: linear layers q, k and v, attention, output projection. Nothing wide between them is then stored."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from comera_compile import torch_private
from comera_compile.passes.graph_nodes import argument, called_name, example, graph_modules
from comera_compile.passes.plan_attention import ATTENTION, attention_inputs
from comera_compile.passes.runs_together import is_free, may_begin, may_end, same_sizes, undisturbed
from comera_compile.planning.attention_plan import pays_off_between_bonds
from comera_compile.planning.uses import ATTEND, INSIDE, PLAN, USE, AttendUse

# Methods and functions of torch that keep the elements in their order, that swap axes, that part the columns.
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "contiguous")
_SWAPS = ("transpose", "swapaxes", "swapdims", "permute")
_PARTS = ("chunk", "split")
_TOKENS_AND_HEADS, _SWAPPED = {1, 2}, (0, 2, 1, 3)


@dataclass(frozen=True)
class _Side:
    """Where q, k or v comes from: columns of a linear use, and the nodes in between."""

    linear: fx.Node
    rows: fx.Node
    widths: tuple[int, ...]
    part: int
    between: tuple[fx.Node, ...]


def find_attention(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Tag the output projection of each block (``node.meta["comera_attend"]``) and what leads to it as inside of it.

    Left alone: what lies between has another reader, something between writes in place or switches gradients or
    autocast, a mask that is trained, heads of k and v that are broadcast without ``enable_gqa`` or have
    another width, bonds wider than a head, very few tokens, a half that is not merged, of another dtype, or not on a
    CPU.
    """
    for module in graph_modules(graph_module):
        for node in module.graph.nodes:
            block = _block(node) if may_end(node) and is_free(node) else None
            if block is not None:
                node.meta[ATTEND] = block
                for inner in (*block.projections, *block.between):
                    inner.meta[INSIDE] = True
    return graph_module


def _block(node: fx.Node) -> AttendUse | None:
    attention, after = _back(node.meta[USE].x)
    if attention.target not in ATTENTION or not _is_known(attention) or not _joins_heads(attention, after):
        return None
    found = [_side(n) for n in attention_inputs(attention)]
    sides = [side for side in found if side is not None]
    if len(sides) < len(found) or not _pays_off(node, attention, sides):
        return None
    projections = tuple(dict.fromkeys(side.linear for side in sides))
    inner = {*projections, *after, attention, *(n for side in sides for n in side.between)}
    closed = all(user is node or user in inner for n in inner for user in n.users)
    # where x was flattened, a projection will read what it was before
    begin = (*projections, *(s.linear.meta[USE].x for s in sides if s.rows is not s.linear.meta[USE].x))
    if not closed or not undisturbed(begin, node, inner):
        return None
    between = [n for n in reversed(node.graph.nodes) if n in inner and n not in projections]
    return _described(node, attention, sides, tuple(between))


def _described(node: fx.Node, attention: fx.Node, sides: Sequence[_Side], between: tuple[fx.Node, ...]) -> AttendUse:
    query, key, _ = map(example, attention_inputs(attention))
    scale = argument(attention, 6, "scale")
    by_linear = {side.linear: side for side in sides}
    return AttendUse(
        projections=tuple(by_linear),
        rows=tuple(side.rows for side in by_linear.values()),
        widths=tuple(side.widths for side in by_linear.values()),
        sides=tuple((list(by_linear).index(side.linear), side.part) for side in sides),
        mask=argument(attention, 3, "attn_mask"),
        heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        causal=bool(argument(attention, 5, "is_causal", False)),
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        dropout=float(argument(attention, 4, "dropout_p", 0.0)),
        flat=example(node).dim() == 2,
        between=between,
    )


def _pays_off(node: fx.Node, attention: fx.Node, sides: Sequence[_Side]) -> bool:
    query, key, _ = map(example, attention_inputs(attention))
    bonds = [n.meta[PLAN].bond for n in (*(side.linear for side in sides), node)]
    return pays_off_between_bonds(query.shape[2], key.shape[2], max(bonds), int(query.shape[3]))


def _back(node: Any) -> tuple[fx.Node, list[fx.Node]]:
    """Back through views: what they begin with, and the views in the graph's order."""
    path: list[fx.Node] = []
    while _is_reshape(node) or _is_swap(node):
        path.insert(0, node)
        node = node.args[0]
    return node, path


def _side(node: fx.Node) -> _Side | None:
    """Where ``[batch, heads, tokens, dim]`` comes from, if that is columns of a linear use."""
    source, path = _back(node)
    swap = _only_swap(path)
    if swap is None or not same_sizes(example(node).shape, example(swap).shape):
        return None
    batch, heads, tokens, dim = example(swap).shape
    linear, part, between = source, 0, path
    widths: tuple[int, ...] = (heads * dim,)
    if source.target is operator.getitem and isinstance(source.args[1], int):
        parting: Any = source.args[0]
        widths, part = _widths(parting), source.args[1]
        linear, before = _back(parting.args[0]) if widths else (source, [])
        between = [*before, parting, source, *path]
    if not may_begin(linear) or any(map(_is_swap, between[: between.index(swap)])):
        return None
    rows = _rows(linear.meta[USE].x, batch, tokens)
    fits = 0 <= part < len(widths) and torch_private.holds(widths[part] == heads * dim)
    whole = sum(widths) == example(linear).shape[-1] and _leads(example(source), batch, tokens)
    return _Side(linear, rows, widths, part, tuple(between)) if rows is not None and fits and whole else None


def _leads(value: torch.Tensor, batch: Any, tokens: Any) -> bool:
    """Whether the axes before the last are batch and tokens, or both in one."""
    return same_sizes(value.shape[:-1], (batch, tokens)) or same_sizes(value.shape[:-1], (batch * tokens,))


def _rows(x: fx.Node, batch: Any, tokens: Any) -> fx.Node | None:
    """x with axes of their own for batch and tokens: itself, or what it is a flat view of."""
    if same_sizes(example(x).shape[:-1], (batch, tokens)):
        return x
    inner = x.args[0] if _is_reshape(x) else None
    whole = isinstance(inner, fx.Node) and same_sizes(example(inner).shape[:-1], (batch, tokens))
    return inner if whole and example(inner).shape[-1] == example(x).shape[-1] else None  # type: ignore


def _widths(parting: fx.Node) -> tuple[int, ...]:
    """Columns of the parts of a tensor that is cut up along its last axis, else nothing."""
    if not _is_called(parting, _PARTS):
        return ()
    whole, parts = example(parting.args[0]), parting.meta["example_value"]  # type: ignore[arg-type]
    widths = tuple(part.shape[-1] for part in parts)
    alike = all(same_sizes(part.shape[:-1], whole.shape[:-1]) for part in parts)
    return widths if alike and all(isinstance(w, int) for w in widths) and sum(widths) == whole.shape[-1] else ()


def _is_called(node: fx.Node, names: Sequence[str]) -> bool:
    """Whether a node calls a method of a tensor, or torch's function, of one of these names on its first argument."""
    name = called_name(node)
    known = node.op == "call_method" or (node.op == "call_function" and getattr(torch, name, None) is node.target)
    return known and name in names and bool(node.args) and isinstance(node.args[0], fx.Node)


def _is_reshape(node: fx.Node) -> bool:
    # a view as another dtype is none
    return _is_called(node, _RESHAPES) and example(node).dtype == example(node.args[0]).dtype  # type: ignore[arg-type]


def _is_swap(node: fx.Node) -> bool:
    """Whether a node swaps the two middle ones of four axes."""
    if not _is_called(node, _SWAPS) or example(node).dim() != 4:
        return False
    given = [*node.args[1:], *node.kwargs.values()]
    flat = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    axes = [axis % 4 for axis in flat if isinstance(axis, int)]
    return tuple(axes) == _SWAPPED if called_name(node) == "permute" else set(axes) == _TOKENS_AND_HEADS


def _only_swap(path: Sequence[fx.Node]) -> fx.Node | None:
    swaps = [node for node in path if _is_swap(node)]
    return swaps[0] if len(swaps) == 1 else None


def _joins_heads(attention: fx.Node, path: Sequence[fx.Node]) -> bool:
    """Whether ``[batch, heads, tokens, dim]`` becomes ``[batch, tokens, heads * dim]``, or that with two axes."""
    swap = _only_swap(path)
    if swap is None:
        return False
    batch, tokens, heads, dim = example(swap).shape
    joined = example(path[-1])
    settled = same_sizes(example(attention).shape, (batch, heads, tokens, dim))
    return settled and torch_private.holds(joined.shape[-1] == heads * dim) and _leads(joined, batch, tokens)


def _is_known(attention: fx.Node) -> bool:
    """Whether the operator knows what a call of attention asks for."""
    query, key, value = map(example, attention_inputs(attention))
    scale, causal = argument(attention, 6, "scale"), argument(attention, 5, "is_causal", False)
    dropout = argument(attention, 4, "dropout_p", 0.0)
    plain = isinstance(dropout, (int, float)) and 0 <= dropout <= 1 and isinstance(causal, bool)
    if not plain or not (scale is None or isinstance(scale, (int, float))):
        return False
    if any(t.dim() != 4 for t in (query, key, value)):
        return False
    if not same_sizes(key.shape, value.shape) or not same_sizes(query.shape[::3], key.shape[::3]):
        return False
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    if not all(isinstance(size, int) and size > 0 for size in (heads, kv_heads, dim)):
        return False
    grouped = heads % kv_heads == 0 if argument(attention, 7, "enable_gqa", False) else heads == kv_heads
    same = all(t.dtype == query.dtype for t in (key, value, example(attention)))
    scores = (*query.shape[:3], key.shape[2])
    return grouped and same and _is_known_mask(argument(attention, 3, "attn_mask"), causal, query.dtype, scores)


def _is_known_mask(mask: Any, causal: bool, dtype: torch.dtype, scores: Sequence[Any]) -> bool:
    """Whether there is no mask, or one that is not trained and that is broadcast to the scores at most."""
    if mask is None:
        return True
    if causal or not isinstance(mask, fx.Node) or example(mask).requires_grad:
        return False
    value = example(mask)
    sizes = list(zip(reversed(value.shape), reversed(scores), strict=False))
    fits = all(torch_private.holds(mine == 1) or torch_private.holds(mine == full) for mine, full in sizes)
    return value.dtype in (torch.bool, dtype) and value.dim() <= 4 and fits
