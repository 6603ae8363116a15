"""What the first compiled call does to a model that is still dense."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

from torch import fx, nn

from comera_compile import ledger, torch_private
from comera_compile.decide import Found
from comera_compile.discover import find_dense_parameters
from comera_compile.errors import CompileError
from comera_compile.ledger import Decision
from comera_compile.options import Options
from comera_compile.tensorize import convert, summary
from comera_compile.weights import tt_module
from comera_compile.weights.owners import is_matrix
from comera_compile.weights.placement import is_sharded

_log = logging.getLogger("comera_compile")
_REASONS = 3
# Modules of which it has been said that nothing in them was converted: each graph would say it again.
_told: WeakSet[nn.Module] = WeakSet()


def convert_called(graph_module: fx.GraphModule, options: Options) -> bool:
    """Convert the parameters of a traced graph and, with them, of the whole module whose call is being compiled.

    A graph break cuts a model into several graphs, each compiled on its own. Whatever is wrong with one of its weights
    has to be found before the first of them is changed, and what is stored as a tensor train must not depend on
    where a graph ends.

    Returns:
        Whether weights were converted, so that the graph no longer shows what they are.

    Raises:
        ComeraError: options, weights or their placement do not allow it; nothing has been changed.
    """
    root = torch_private.called_module()
    found = find_dense_parameters(graph_module)
    found += _others(root, found)
    if not found:
        return False
    roots = torch_private.traced_modules() if root is None else [root]
    packed = any(tt_module.shapes_of(module) for r in roots for module in r.modules())
    if packed and any(is_sharded(r) for r in roots):
        return False  # converted before it was sharded; what was left dense then is to stay so
    decisions = convert(found, options, roots)
    if any(d.shape is not None for d in decisions):
        _log.warning(summary(decisions))
        return True
    if decisions and not packed and not any(r in _told for r in roots):
        _nothing_to_gain(decisions, options)
        _told.update(roots)
    return False


def _others(root: nn.Module | None, found: Sequence[Found]) -> list[Found]:
    """The rest of the called module's matrices that nothing has been decided about.

    What an eager part of the model, run before this graph, has used already cannot change its shape now; it is looked
    at again when a graph uses it.
    """
    if root is None:
        return []
    in_graph = {id(f.parameter) for f in found}
    rest = [p for p in root.parameters() if is_matrix(p) and id(p) not in in_graph and not ledger.is_settled(p)]
    return [Found(p) for p in rest if not torch_private.has_live_graph(p)]


def _nothing_to_gain(decisions: Sequence[Decision], options: Options) -> None:
    """Say that, and why, nothing was converted.

    Raises:
        CompileError: ``strict`` forbids to go on without tensor trains.
    """
    reasons = "; ".join(f"{d.name}: {d.reason}" for d in decisions[:_REASONS])
    more = f"; and {len(decisions) - _REASONS} more, see comera.report(model)" if len(decisions) > _REASONS else ""
    text = f"no weight became a tensor train ({reasons}{more})"
    # What is not final may still turn out to be a linear weight in a later graph of the same call.
    if options.strict and all(d.final for d in decisions):
        raise CompileError(f"{text}; change the options, or leave strict=False to run as {options.inner} would")
    _log.warning("comera: %s; the model runs as with backend=%r", text, options.inner)
