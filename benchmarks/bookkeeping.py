"""CoMERA's own size table (arXiv 2405.14377, MNLI experiment), computed from shapes: what its 64.8x counts."""

from __future__ import annotations

from dataclasses import dataclass

from comera_compile.tt.shape import TTShape

LINEAR_RANK = 30
EMBEDDING_RANK = 32
_R = LINEAR_RANK


@dataclass(frozen=True)
class Block:
    """Equal weights of the model."""

    name: str
    count: int
    shape: TTShape

    @property
    def parameters(self) -> int:
        """Tensor-train parameters of all weights of the block."""
        return self.count * self.shape.numel

    @property
    def dense(self) -> int:
        """Dense parameters of the same weights."""
        return self.count * self.shape.dense_numel


def blocks() -> list[Block]:
    """Every weight that CoMERA tensorizes, at its initial ranks.

    25 are of attention type: four in each of six encoders and the classifier's hidden layer. The embedding's modes
    stand for 32,000 rows; the dense count is that of the 30,522 real ones.
    """
    attention = TTShape("tt", 768, 768, (12, 8, 8), (8, 8, 12), (1, 12, _R, _R, _R, 12, 1))
    widen = TTShape("tt", 3072, 768, (16, 16, 12), (8, 8, 12), (1, 16, _R, _R, _R, 12, 1))
    narrow = TTShape("tt", 768, 3072, (12, 8, 8), (12, 16, 16), (1, 12, _R, _R, _R, 16, 1))
    ranks = (1, EMBEDDING_RANK, EMBEDDING_RANK, EMBEDDING_RANK, 1)
    embedding = TTShape("ttm", 30522, 768, (16, 20, 10, 10), (4, 4, 8, 6), ranks)
    return [
        Block("attention 768x768", 25, attention),
        Block("FFN 3072x768", 6, widen),
        Block("FFN 768x3072", 6, narrow),
        Block("embedding 30522x768", 1, embedding),
    ]


def totals() -> tuple[int, int]:
    """Tensor-train and dense parameters of all blocks: 1,026,528 and 66,498,048."""
    return sum(b.parameters for b in blocks()), sum(b.dense for b in blocks())
