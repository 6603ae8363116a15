"""Pass 1: find marker ops and tag every node that uses one in a way for which there are planned contractions.

Known uses: linear, matmul/mm/addmm with the weight or its transpose as second factor, embedding. Any other use keeps
the marker, which rebuilds the dense matrix: right, only slower, and counted in the report.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from comera_compile.errors import CompileError
from comera_compile.passes.graph_nodes import argument, called_name, example, graph_modules, writes
from comera_compile.planning.linear_plan import Side
from comera_compile.planning.uses import USE, TTUse
from comera_compile.tt.marker import decode, is_marker
from comera_compile.tt.shape import TTShape

_LINEAR = (F.linear, torch._C._nn.linear)
_MATMUL: tuple[Any, ...] = (torch.matmul, torch.mm, operator.matmul)
_TRANSPOSES: dict[Any, tuple[Any, ...]] = {
    "t": (),
    "transpose": (0, 1),
    "permute": (1, 0),
    "numpy_T": (),
    "swapaxes": (0, 1),
    "adjoint": (),
}


def find_tt_weights(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Tag known uses (``node.meta["comera_use"]``) in the graph and in the bodies of its higher-order ops.

    Raises:
        CompileError: the graph writes in place to the dense matrix of a packed weight; the write would be lost.
    """
    for module in graph_modules(graph_module):
        for node in module.graph.nodes:
            if is_marker(node):
                _tag_users(node)
    return graph_module


def _tag_users(marker: fx.Node) -> None:
    _refuse_writes(marker)
    for user in marker.users:
        if _is_transpose(user, marker):
            for second in user.users:
                _tag(second, marker, weight=user, transposed=True)
        else:
            _tag(user, marker, weight=marker, transposed=False)


def _tag(node: fx.Node, marker: fx.Node, *, weight: fx.Node, transposed: bool) -> None:
    packed, layout = marker.args[0], marker.args[1]
    assert isinstance(packed, fx.Node) and isinstance(layout, str)
    shape = decode(layout)
    if shape.format == "ttm":
        if node.target is F.embedding and not transposed and _is_plain_lookup(node, weight, shape):
            node.meta[USE] = TTUse("embedding", packed, layout, "rows", argument(node, 0, "input"), None)
        return
    operands = _linear_operands(node, weight)
    if operands is None:
        return
    x, bias, weight_is_transposed = operands
    contracts: Side = "cols" if weight_is_transposed != transposed else "rows"
    width = shape.rows if contracts == "cols" else shape.cols
    # addmm also takes a whole matrix, or something to be broadcast, in the place of a bias.
    if bias is None or tuple(example(bias).shape) == (width,):
        node.meta[USE] = TTUse("linear", packed, layout, contracts, x, bias)


def _is_plain_lookup(node: fx.Node, weight: fx.Node, shape: TTShape) -> bool:
    """Whether a lookup differentiates like an indexing of the table: other gradients belong to some of its options."""
    padding = argument(node, 2, "padding_idx")
    known_padding = padding is None or padding % shape.rows == shape.zero_row
    special = argument(node, 3, "max_norm") is not None or argument(node, 5, "scale_grad_by_freq", False)
    return argument(node, 1, "weight") is weight and known_padding and not special


def _linear_operands(node: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node | None, bool] | None:
    """``(x, bias, whether the op itself transposes the weight)`` of a product of x with the weight, else None."""
    x: Any = None
    bias: Any = None
    if node.kwargs.get("out") is not None:
        return None
    if node.target in _LINEAR:
        x, factor, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
        found = (x, bias, True)
    elif node.target in _MATMUL or (node.op == "call_method" and node.target in ("matmul", "mm", "__matmul__")):
        x, factor = argument(node, 0, "input"), argument(node, 1, "mat2", node.kwargs.get("other"))
        found = (x, None, False)
    elif node.target is torch.addmm and {node.kwargs.get(k, 1) for k in ("alpha", "beta")} == {1}:
        bias, x, factor = argument(node, 0, "input"), argument(node, 1, "mat1"), argument(node, 2, "mat2")
        found = (x, bias, False)
    else:
        return None
    return found if factor is weight and isinstance(x, fx.Node) and x is not weight and bias is not weight else None


def _is_transpose(node: fx.Node, weight: fx.Node) -> bool:
    if not node.args or node.args[0] is not weight:
        return False
    if node.target is getattr:
        return node.args[1] in ("T", "mT")
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name not in _TRANSPOSES or node.op not in ("call_method", "call_function"):
        return False
    given = node.args[1:] or tuple(node.kwargs.values())
    flat = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    dims = tuple(d % 2 for d in flat if isinstance(d, int))
    return not dims or (sorted(dims) == [0, 1] and (name != "permute" or dims == (1, 0)))


def _refuse_writes(marker: fx.Node) -> None:
    for alias in _aliases(marker):
        for user in alias.users:
            if any(alias in _flat(target) for target in _written(user)):
                raise CompileError(
                    f"the compiled code writes in place ({called_name(user)}) to the dense matrix of a tensor-train "
                    "weight; the write would be lost. Do it outside the compiled function, or keep the layer dense "
                    "with the option exclude"
                )


def _written(node: fx.Node) -> list[Any]:
    """The arguments that a node writes to."""
    if isinstance(node.target, torch._ops.OpOverload):
        known = list(enumerate(node.target._schema.arguments))
        return [argument(node, k, a.name) for k, a in known if a.alias_info is not None and a.alias_info.is_write]
    first = [*node.args[:1], node.kwargs.get("input")] if writes(node) else []
    return [*first, node.kwargs.get("out")]


def _aliases(node: fx.Node) -> list[fx.Node]:
    """A node and all views of it, of any depth: what shares its storage in Dynamo's fake tensors."""
    found, storages = [node], _storages(node)
    for alias in found:
        found += [user for user in alias.users if user not in found and _storages(user) & storages]
    return found


def _storages(node: fx.Node) -> set[int]:
    values = _flat(node.meta.get("example_value"))
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided}


def _flat(value: Any) -> Sequence[Any]:
    """The parts of a list or tuple (``torch._foreach_*``, ``unbind``), or the value alone."""
    return value if isinstance(value, (list, tuple)) else (value,)
