"""What a cut forward graph saves for its backward, told apart: tensors that plans made, and the rest."""

from __future__ import annotations

from torch import fx

from comera_compile.ledger import SavedBytes
from comera_compile.planning.uses import BY_PLAN
from comera_compile.torch_partition import hinted_bytes, saved_storages


def count_saved(forward: fx.GraphModule, forward_outputs: int) -> SavedBytes:
    """Bytes that a forward graph hands to its backward; nothing has to run, or be lowered, for it.

    Args:
        forward: as AOTAutograd cuts it, with the marks that ``lower_plans`` has put on what plans make.
        forward_outputs: number of its own outputs; what is saved comes after them.
    """
    planned, rest = 0, 0
    for node in saved_storages(forward, forward_outputs):
        size = hinted_bytes(node.meta.get("val"))
        if node.meta.get("custom", {}).get(BY_PLAN):
            planned += size
        else:
            rest += size
    return SavedBytes(planned, rest)
