"""tensorly-torch's block tensor-train layer at the size of ours, in both ways it can be run."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Literal

from torch import nn

from benchmarks import peers
from benchmarks.six_encoders import INIT_STD
from comera_compile.tt.shape import TTShape

Implementation = Literal["factorized", "reconstructed"]


def make(ours: TTShape, implementation: Implementation) -> nn.Module:
    """A linear layer without bias over the modes of ``ours``, with as equal a number of parameters as its ranks allow.

    Args:
        ours: a ``tt`` shape; tensorly-torch pairs its row modes with its column modes.
        implementation: contract the cores with the input, or rebuild the matrix.

    Raises:
        peers.PeerMissingError: tensorly-torch is not installed.
    """
    peers.require("tensorly")
    layer_class = importlib.import_module("tltorch").FactorizedLinear
    made: nn.Module = layer_class(
        ours.col_modes,
        ours.row_modes,
        bias=False,
        factorization="blocktt",
        rank=nearest_ranks(ours),
        implementation=implementation,
    )
    std = (INIT_STD / math.sqrt(math.prod(nearest_ranks(ours)))) ** (1 / len(ours.row_modes))
    for core in made.parameters():
        nn.init.normal_(core, std=std)
    return made


def nearest_ranks(ours: TTShape) -> tuple[int, ...]:
    """Inner ranks, equal or one apart, whose block tensor train is nearest to ``ours`` in parameters."""
    common = peers.block_ranks(ours)[1]
    choices = itertools.product((common, common + 1), repeat=len(ours.row_modes) - 1)
    ranks = [(1, *inner, 1) for inner in choices]
    return min(ranks, key=lambda each: abs(peers.block_numel(ours, each) - ours.numel))
