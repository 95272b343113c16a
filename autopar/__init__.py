"""autopar: parallelizes PyTorch models by itself."""

from autopar.api import parallelize, plan
from autopar.losses import LossOutput
from autopar.parts import replace_part
from autopar.precision import Precision
from autopar.runtime import DistributedModule
from passes.cost.cluster import Cluster, Device, Link
from passes.ir.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    ConstraintError,
    ExpressionError,
    InfeasibleError,
    InputError,
    MeshError,
    MicroBatchError,
    PlanMismatchError,
    UnsupportedError,
)
from passes.ir.plan import Plan

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "ClusterError",
    "ConstraintError",
    "Device",
    "DistributedModule",
    "ExpressionError",
    "InfeasibleError",
    "InputError",
    "Link",
    "LossOutput",
    "MeshError",
    "MicroBatchError",
    "Plan",
    "PlanMismatchError",
    "Precision",
    "UnsupportedError",
    "parallelize",
    "plan",
    "replace_part",
]
