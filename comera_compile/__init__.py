"""Train ordinary PyTorch models in tensor-train form: ``torch.compile(model, backend="comera")``."""

from comera_compile.autotune import Tuning, autotune
from comera_compile.backend import Backend
from comera_compile.errors import (
    ComeraError,
    CompileError,
    OptionError,
    PlacementError,
    ShapeError,
    VersionError,
    WeightError,
)
from comera_compile.explain import Explanation, explain
from comera_compile.param_groups import param_groups
from comera_compile.report import Report, report
from comera_compile.tensorize import densify, tensorize
from comera_compile.version import VERSION
from comera_compile.weights.checkpoint import dense_state_dict

__version__ = VERSION

__all__ = [
    "Backend",
    "ComeraError",
    "CompileError",
    "Explanation",
    "OptionError",
    "PlacementError",
    "Report",
    "ShapeError",
    "Tuning",
    "VersionError",
    "WeightError",
    "__version__",
    "autotune",
    "dense_state_dict",
    "densify",
    "explain",
    "param_groups",
    "report",
    "tensorize",
]
