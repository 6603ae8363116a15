"""How far the plan of a linear product is from the cheapest that there is: the exact search as a yardstick.

What runs is one of the groupings of ``linear_plan``: few, closed under every number of rows, and cheap to compare. The
search goes through every plan over the candidate DAG, forward and backward together, whose cheapest plan is nearly
always a grouping too; where it is not, this says by how much. Every contraction is one of torch's products here, so a
grouping has to be priced without this package's own operators to be held against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from comera_compile.planning.candidates import find_candidates
from comera_compile.planning.cost import Objective, steps_cost
from comera_compile.planning.device_model import DeviceModel
from comera_compile.planning.linear_plan import Side
from comera_compile.planning.problem import Problem, linear_problem
from comera_compile.planning.search import search
from comera_compile.planning.step import Step
from comera_compile.tt.shape import TTShape

SECONDS = 1.0  # of search; orders up to 3 + 3 need a fiftieth of it


@dataclass(frozen=True)
class LeastCost:
    """What the search found.

    Args:
        price: seconds, FLOPs or bytes of the cheapest plan.
        tensors, contractions: nodes of the candidate DAG: intermediates, and ways to make them.
        proven: whether no plan over the DAG is cheaper (False: the time limit came first).
    """

    price: float
    tensors: int
    contractions: int
    proven: bool


@lru_cache(maxsize=256)
def least_cost(
    shape: TTShape,
    contracts: Side,
    rows: int,
    device: DeviceModel,
    itemsize: int,
    training: bool,
    objective: Objective = "time",
    bond_multiple: int = 1,
) -> LeastCost:
    """The cheapest plan for ``rows`` rows, the bond left as it is or padded to a multiple, whichever costs less."""
    found: LeastCost | None = None
    for multiple in sorted({1, bond_multiple}):
        problem = linear_problem(shape, contracts, rows, training=training, bond_multiple=multiple)
        candidates = find_candidates(problem)
        choice = search(candidates, partial(_price, problem, device, itemsize, objective), seconds=SECONDS)
        if found is None or choice.price < found.price:
            pairs = sum(map(len, candidates.pairs.values()))
            found = LeastCost(choice.price, len(candidates.pairs), pairs, choice.optimal)
    assert found is not None
    return found


def _price(problem: Problem, device: DeviceModel, itemsize: int, objective: Objective, step: Step) -> float:
    return steps_cost([step], problem.size_of, device, itemsize).by(objective)
