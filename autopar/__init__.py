"""autopar: parallelizes PyTorch models by itself."""

from autopar.api import parallelize, plan
from autopar.clipping import clip_grad_norm_
from autopar.loading import replace_part
from autopar.models.losses import LossOutput
from autopar.options import Pipeline, Precision
from autopar.runtime import DistributedModule
from passes.cost.cluster import Cluster, Device, Link
from passes.ir.errors import (
    AutoparError,
    CacheError,
    CaptureError,
    CheckpointError,
    ClusterError,
    ConstraintError,
    ExpressionError,
    InfeasibleError,
    InputError,
    MeshError,
    MicroBatchError,
    PipelineError,
    PlanMismatchError,
    RankFailedError,
    UnsupportedAttributeError,
    UnsupportedError,
)
from passes.ir.plan import Plan

__all__ = [
    "AutoparError",
    "CacheError",
    "CaptureError",
    "CheckpointError",
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
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlanMismatchError",
    "Precision",
    "RankFailedError",
    "UnsupportedAttributeError",
    "UnsupportedError",
    "clip_grad_norm_",
    "parallelize",
    "plan",
    "replace_part",
]
