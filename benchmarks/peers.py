"""Optional competitors: tensorly-torch (tensor-train layers) and galore-torch (low-rank gradients).

Neither is needed to use or to test this package; a peer that cannot be imported is reported, not measured.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.plain_tt import MIN_ELEMENTS
from comera_compile.tt.factorize import choose_shape
from comera_compile.tt.shape import TTShape

GALORE_RANK = 128
GALORE_GAP = 200  # steps between two SVDs of every gradient
GALORE_SCALE = 0.25

# What galore-torch imports at its top but AdamW never calls; bitsandbytes wants a GPU and takes seconds to import.
GALORE_STUBS: dict[str, dict[str, object]] = {
    "bitsandbytes": {},
    "bitsandbytes.optim": {},
    "bitsandbytes.optim.optimizer": {"Optimizer2State": torch.optim.Optimizer},
    "transformers": {},
    "transformers.utils": {},
    "transformers.utils.versions": {"require_version": lambda requirement: None},
}


class PeerMissingError(RuntimeError):
    """A peer is not installed; the message says what is missing and how to get it."""


def require(name: str) -> None:
    """Check that a peer can be imported.

    Raises:
        PeerMissingError: it cannot.
    """
    loaders: dict[str, Callable[[], ModuleType]] = {"tensorly": _tltorch, "galore": _galore_torch}
    loaders[name]()


def _tltorch() -> ModuleType:
    return _load("tltorch", "tensorly-torch tensorly")


def _galore_torch() -> ModuleType:
    with stubbed(GALORE_STUBS):
        return _load("galore_torch", "galore-torch")


def _load(module: str, packages: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerMissingError(f"not installed ({error}); to measure it: pip install {packages}") from error


@contextmanager
def stubbed(stubs: dict[str, dict[str, object]]) -> Iterator[None]:
    """Let imports find empty modules with the given names and attributes; everything is put back afterwards."""
    before = {name: sys.modules.get(name) for name in stubs}
    for name, attributes in stubs.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous


def galore_adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """GaLore's AdamW (arXiv 2403.03507), its usual settings: every large linear weight projected, the rest plain."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.numel() >= MIN_ELEMENTS]
    projected = [layer.weight for layer in layers]
    ids = {id(weight) for weight in projected}
    others = [p for p in model.parameters() if id(p) not in ids]
    settings = {"rank": GALORE_RANK, "update_proj_gap": GALORE_GAP, "scale": GALORE_SCALE, "proj_type": "std"}
    groups: list[dict[str, Any]] = [{"params": others}, {"params": projected, **settings}]
    optimizer: torch.optim.Optimizer = _galore_torch().GaLoreAdamW(
        groups, lr=learning_rate, no_deprecation_warning=True
    )
    return optimizer


def replace_with_tensorly(model: nn.Module, rank: int) -> nn.Module:
    """Put tensorly-torch's block tensor-train layers in the place of every large linear and embedding; in place.

    Their cores pair a row mode with a column mode, so equal ranks would mean other sizes: the rank of each layer is the
    largest one with no more parameters than this package's shape at ``rank``.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.numel() >= MIN_ELEMENTS:
                setattr(parent, name, _tensorly_linear(child, rank))
            elif isinstance(child, nn.Embedding) and child.weight.numel() >= MIN_ELEMENTS:
                setattr(parent, name, _tensorly_embedding(child, rank))
    return model


def _tensorly_linear(layer: nn.Linear, rank: int) -> nn.Module:
    ours = choose_shape(layer.out_features, layer.in_features, format="tt", rank=rank)
    layer_class = _tltorch().FactorizedLinear
    made: nn.Module = layer_class(
        ours.col_modes, ours.row_modes, factorization="blocktt", rank=block_ranks(ours), implementation="factorized"
    )
    _draw(made, layer.weight)
    return made


def _tensorly_embedding(layer: nn.Embedding, rank: int) -> nn.Module:
    ours = choose_shape(layer.num_embeddings, layer.embedding_dim, format="ttm", rank=rank)
    rows = 1
    for mode in ours.row_modes:
        rows *= mode
    layer_class = _tltorch().FactorizedEmbedding
    made: nn.Module = layer_class(
        rows,
        layer.embedding_dim,
        auto_tensorize=False,
        tensorized_num_embeddings=ours.row_modes,
        tensorized_embedding_dim=ours.col_modes,
        factorization="blocktt",
        rank=block_ranks(ours),
    )
    _draw(made, layer.weight)
    return made


def block_ranks(ours: TTShape) -> tuple[int, ...]:
    """Ranks of a block tensor train over the same modes: the largest common one with at most as many parameters."""
    order, rank = len(ours.row_modes), 1
    while block_numel(ours, _common(rank + 1, order)) <= ours.numel:
        rank += 1
    return _common(rank, order)


def block_numel(ours: TTShape, ranks: Sequence[int]) -> int:
    """Parameters of a block tensor train of the given ranks over the modes of ``ours``."""
    pairs = [v * e for v, e in zip(ours.row_modes, ours.col_modes, strict=True)]
    return sum(left * mode * right for left, mode, right in zip(ranks[:-1], pairs, ranks[1:], strict=True))


def _common(rank: int, order: int) -> tuple[int, ...]:
    return (1, *[rank] * (order - 1), 1)


def _draw(made: nn.Module, dense: torch.Tensor) -> None:
    """Give a tensorly layer entries of the dense weight's standard deviation: its own choice overflows here."""
    with torch.no_grad():
        made.get_submodule("weight").normal_(0, float(dense.std()))  # type: ignore[operator]
        if isinstance(getattr(made, "bias", None), nn.Parameter):
            nn.init.zeros_(made.get_parameter("bias"))
