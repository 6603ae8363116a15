"""When scaled dot-product attention is cheaper as two batched products and a softmax than as torch's blocked kernel.

On a CPU the blocked ("flash") kernel pays off once the scores leave the cache. For short sequences its small inner
products run at a third of the peak, while the batched products reach two thirds: forward and backward together are
1.3-1.4 times as fast at 128 tokens, equal at 256, slower at 512 (measured; docs/log.md). A tensor-train model spends
a quarter of its step there, since nothing of attention itself shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_SHORT = 160
FEWEST_BETWEEN_BONDS = 4


@dataclass(frozen=True)
class AttentionPlan:
    """Attention as products: scores = q k^T, softmax, times v. The probabilities are saved for the backward."""

    causal: bool
    scale: float | None

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "attention as two batched products"


def pays_off(queries: object, keys: object, device_type: str) -> bool:
    """Whether sequences of these (static) lengths are short enough; symbolic lengths are left to torch's kernel."""
    if device_type != "cpu" or not isinstance(queries, int) or not isinstance(keys, int):
        return False
    return 0 < queries <= LONGEST_SHORT and 0 < keys <= LONGEST_SHORT


def pays_off_between_bonds(queries: object, keys: object, bond: int, dim: int) -> bool:
    """Whether attention is to run from the bonds of q, k and v to that of the output projection, the widest ``bond``.

    Every product of queries with keys is then as wide as a bond, otherwise as wide as a head, ``dim``: it takes less
    time at all lengths measured from four tokens on (docs/log.md). With one token, what is made for each head outweighs
    it. Symbolic lengths are taken to be long.
    """
    few = any(isinstance(tokens, int) and tokens < FEWEST_BETWEEN_BONDS for tokens in (queries, keys))
    return bond <= dim and not few
