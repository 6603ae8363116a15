"""How rows of a tensor-train-matrix embedding table are looked up.

Ids are made unique first. The cores are cut into two halves; each unique half index is computed once, either by
gathering the core slices it needs (few of them) or as the table of all (many: one large product instead of many small
ones), and one batched product joins the halves of every unique id. This is CoMERA's lookup (section 4.1) with the
choice of gather or table added; how many are few is only known once the ids are, so the choice is made when it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from comera_compile.tt.shape import TTShape

# A gathered half index costs about this many times what one row of the all-pairs table costs.
GATHER_COST = 3


@dataclass(frozen=True)
class LookupPlan:
    """Plan of one ``ttm`` lookup: the cores ``[0, split)`` are one half, the rest the other."""

    shape: TTShape

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "unique ids, halves once, one batched product"

    @property
    def split(self) -> int:
        """Number of cores in the first half: the cut that balances the two tables."""
        order = len(self.shape.row_modes)
        return 1 if order == 1 else min(range(1, order), key=lambda k: max(self.table_sizes(k)))

    def table_sizes(self, split: int) -> tuple[int, int]:
        """Elements of the two halves' tables under a cut."""
        v, e, r = self.shape.row_modes, self.shape.col_modes, self.shape.ranks[split]
        left = math.prod(v[:split]) * math.prod(e[:split]) * r
        return left, math.prod(v[split:]) * math.prod(e[split:]) * r

    def uses_table(self, needed: int, half: int) -> bool:
        """Whether ``needed`` unique half indices (``half`` 0 or 1) are cheaper as a table of all."""
        modes = self.shape.row_modes[: self.split] if half == 0 else self.shape.row_modes[self.split :]
        return len(modes) > 1 and needed * GATHER_COST >= math.prod(modes)

    def encode(self) -> str:
        """One line of text from which the plan can be rebuilt."""
        return self.shape.encode()

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(text: str) -> LookupPlan:
        """Inverse of :meth:`encode`."""
        return LookupPlan(TTShape.decode(text))

    def flops(self, unique: int) -> int:
        """Floating-point operations of the joining product for ``unique`` ids (forward)."""
        return 2 * unique * math.prod(self.shape.col_modes) * self.shape.ranks[self.split]
