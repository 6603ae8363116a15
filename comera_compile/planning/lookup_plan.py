"""How rows of a tensor-train-matrix embedding table are looked up.

Ids are made unique first. Then one core after the other is joined: every distinct prefix of digits is computed once,
from the distinct prefixes one digit shorter. A join is a sparse set of pairs (prefix, digit), each the product of the
prefix's value and the core's slice. Pairs of one digit, or of one prefix, become one larger product: which of the two
moves less is a matter of sizes that are only known once the ids are, so the choice is made when it runs. Unique ids are
CoMERA's lookup (section 4.1); the rest is not in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from comera_compile.tt.shape import TTShape

# A small product of its own costs as much time as moving this many elements.
PRODUCT_COST = 900


@dataclass(frozen=True)
class LookupPlan:
    """Plan of one ``ttm`` lookup."""

    shape: TTShape

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "unique ids, each prefix once, grouped products"

    def groups_by_digit(self, core: int, *, pairs: int, prefixes: int) -> bool:
        """Whether the pairs of a join are grouped by digit (each gathers its prefix) or by prefix (each its slice).

        Args:
            core: position of the core that is joined, at least 1.
            pairs: distinct prefixes with the new digit.
            prefixes: distinct prefixes without it.
        """
        left, rows, columns, right = self.shape.core_shapes[core]
        before = math.prod(self.shape.col_modes[:core])
        value, piece = before * left, left * columns * right
        made = before * columns * right
        by_digit = pairs * (value + made) + min(pairs, rows) * PRODUCT_COST
        # grouped by prefix, products come out with their columns in another order: moved once more
        by_prefix = prefixes * (value + PRODUCT_COST) + pairs * (piece + 2 * made)
        return by_digit <= by_prefix

    def encode(self) -> str:
        """One line of text from which the plan can be rebuilt."""
        return self.shape.encode()

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(text: str) -> LookupPlan:
        """Inverse of :meth:`encode`."""
        return LookupPlan(TTShape.decode(text))
