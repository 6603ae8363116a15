"""How untrained cores are drawn, and the fixed scale between a stored core and the core that it stands for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comera_compile.tt.shape import TTShape


def draw_packed(shape: TTShape, std: float, *, seed: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Independent normal cores that give every entry of the dense weight mean 0 and variance ``std ** 2``.

    An entry is a sum over all values of the inner ranks of a product with one factor per core. The terms are
    uncorrelated, so its variance is ``prod(inner ranks) * core_std ** (2 * n_cores)``. With one standard deviation for
    all cores this fixes it to ``core_std = (std / sqrt(prod(inner ranks))) ** (1 / n_cores)``, whatever ranks and
    order. (CoMERA, arXiv 2405.14377, spreads the ranks over the cores instead: same variance of the weight, but cores
    of different size, so that one learning rate would not suit all of them.)

    Args:
        shape: modes, ranks and scale; the stored cores are the drawn ones divided by ``shape.scale``.
        std: standard deviation of the dense weight. 0 gives a weight of exactly zero that can still learn: only the
            last core is zero, as the second factor of a low-rank adapter.
        seed: same seed, same cores, on every device and in every dtype up to rounding; no global random state is used.
        dtype: of the result; always drawn in float64.
        device: of the result; drawn on the CPU.

    Returns:
        ``(shape.numel,)`` stored cores.
    """
    core_std = core_rms(shape, std if std > 0 else 1.0)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    # Device and dtype are said because torch's defaults belong to the user.
    normal = torch.randn(shape.numel, generator=generator, dtype=torch.float64, device="cpu") * core_std
    if std == 0:
        normal[-shape.core_sizes[-1] :] = 0
    return (normal / shape.scale).to(device=device, dtype=dtype)


def core_rms(shape: TTShape, std: float) -> float:
    """Root mean square of every core of an untrained weight whose entries have standard deviation ``std``."""
    return float((std / math.sqrt(math.prod(shape.ranks))) ** (1 / len(shape.core_shapes)))


def step_share(n_cores: int) -> float:
    """By how much a dense entry moves, relative to a core entry, when all cores move at once: ``sqrt(n_cores)``.

    Between 1 (one core moves) and ``n_cores`` (all moves of all cores agree in sign); independent moves add up like
    the square root.
    """
    return math.sqrt(n_cores)


def stored_scale(core_rms: float, weight_rms: float, n_cores: int, damping: float = 1.0) -> float:
    """The fixed ``scale`` with core = scale * stored for which the learning rate of the dense weight suits the cores.

    Adam moves every entry of what it is given by about the rate ``lr``. A dense weight then moves by ``lr`` an entry,
    relative to its size ``lr / weight_rms``. A stored core moves by ``lr``, its core by ``scale * lr``, relative to its
    size ``scale * lr / core_rms``; and the weight, being linear in every core, by ``step_share(n_cores)`` times that
    when all cores move. Equal relative motion of the weight means ``step_share * scale / core_rms = 1 / weight_rms``,
    hence ``scale = core_rms / (step_share(n_cores) * weight_rms)``.

    Rounded to the nearest ``2 ** (k / 4)``, so that layers of about equal statistics share one constant and with it
    their generated code.

    Args:
        core_rms: root mean square of the entries of the cores.
        weight_rms: root mean square of the entries of the dense weight.
        n_cores: number of cores that the optimizer moves together.
        damping: the scale is divided by this: above 1 for slower cores.

    Returns:
        The scale; 1.0 where ``weight_rms`` or ``core_rms`` is 0 (nothing to be relative to).
    """
    if weight_rms <= 0 or core_rms <= 0:
        return 1.0
    exact = core_rms / (damping * step_share(n_cores) * weight_rms)
    return float(2.0 ** (round(4 * math.log2(exact)) / 4))
