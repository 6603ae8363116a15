"""The plans that run against the exact optimum over the candidate DAG."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comera_compile.planning.choose import ranked_plans
from comera_compile.planning.cost import Objective, plan_cost
from comera_compile.planning.device_model import cpu_model
from comera_compile.planning.least_cost import least_cost
from comera_compile.tt.factorize import choose_shape

LAYERS = [(768, 768), (3072, 768), (768, 3072), (512, 512)]


@pytest.mark.parametrize(("out", "inner"), LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_the_best_grouping_is_nearly_the_best_plan(out: int, inner: int, training: bool) -> None:
    # The search fixes one axis order a tensor, a grouping has its own: a copy more or less either way.
    device = replace(cpu_model(2), kernels=None)  # as torch's products: the search knows no others
    for rank in (16, 32):
        shape = choose_shape(out, inner, format="tt", rank=rank)
        for rows in (1, 32, 512):
            best = ranked_plans(shape, "cols", "cpu", 2, 4, training, rows, device)[0]
            ours = plan_cost(best, rows, device, 4, training=training).seconds
            least = least_cost(shape, "cols", rows, device, 4, training, "time", 16)
            assert least.proven
            assert 0.97 * least.price <= ours <= 1.06 * least.price


@pytest.mark.parametrize("objective", ["flops", "bytes"])
def test_other_objectives(objective: Objective) -> None:
    shape, device = choose_shape(768, 768, format="tt", rank=32), cpu_model(2)
    for rows in (8, 512):
        best = ranked_plans(shape, "cols", "cpu", 2, 4, True, rows, objective=objective)[0]
        least = least_cost(shape, "cols", rows, device, 4, True, objective, 16)
        # FLOPs do not depend on the order of axes: the optimum over more plans is no dearer.
        ours = plan_cost(best, rows, device, 4).by(objective)
        assert least.proven and least.price <= ours * (1 + 1e-9 if objective == "flops" else 1.03)


def test_padding_of_the_bond_is_left_to_the_cheaper_side() -> None:
    # At rank 8 and many rows a bond of 16 is twice the work, though a narrow product runs at a lower rate.
    shape, device = choose_shape(512, 512, format="tt", rank=8), cpu_model(2)
    both = least_cost(shape, "cols", 4096, device, 4, True, "flops", 16)
    assert both.price == least_cost(shape, "cols", 4096, device, 4, True, "flops", 1).price
