"""Begins to build the C++ of a model's weights as soon as it is known what they are, beside tracing and planning."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from comera_compile.codegen.cpu import attend_kernels, lookup_kernels, merge_kernels, skinny_kernels
from comera_compile.cpp_library import start_building
from comera_compile.tt.shape import TTShape


def build_ahead(weights: Iterable[tuple[torch.dtype, TTShape]], *, attention: bool) -> None:
    """Start what weights of these dtypes and shapes on a CPU will call; dtypes without a library are passed over.

    ``attention``: whether there is attention beside them, which may run from bond to bond.
    """
    for dtype, shape in weights:
        if dtype not in merge_kernels.ELEMENTS:
            continue
        if len(shape.row_modes) in lookup_kernels.ORDERS and shape.format == "ttm":
            start_building(*lookup_kernels.sources(dtype, shape))
        if shape.format == "tt":
            start_building(*merge_kernels.sources(dtype))
            start_building(*skinny_kernels.sources(dtype))
            if attention:
                start_building(*attend_kernels.sources(dtype))
