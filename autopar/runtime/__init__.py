"""The library that generated code calls, and the distributed module that runs generated code."""

import passes.ops  # noqa: F401  (operators that capture writes into programs)
from autopar.runtime.calls.inputs import named_arguments, require_strided
from autopar.runtime.generated.attention import blockwise_attention
from autopar.runtime.generated.bases import (
    Container,
    Generated,
    GeneratedProgram,
    LoadedProgram,
    OtherSizes,
    PlannedInput,
    PlannedOutput,
    RegionCopy,
    gathered,
    local,
)
from autopar.runtime.generated.chunked_attention import chunked_attention
from autopar.runtime.generated.collectives import all_gather, all_reduce, all_to_all, convert, reduce_scatter
from autopar.runtime.generated.delta_scan import split_delta_scan
from autopar.runtime.generated.forms import (
    split_batch_norm,
    split_cumsum,
    split_group_norm,
    split_layer_norm,
    split_log_softmax,
    split_logsumexp,
    split_rms_norm,
    split_softmax,
    split_updating_batch_norm,
    vocabulary_cross_entropy,
    vocabulary_embedding,
    with_halo,
)
from autopar.runtime.generated.linear_loss import linear_cross_entropy
from autopar.runtime.generated.ring_attention import ring_attention
from autopar.runtime.generated.saving import recomputed
from autopar.runtime.generated.selective_scan import split_selective_scan
from autopar.runtime.module import DistributedModule
from autopar.runtime.state import Axis
from passes.ir.layout import I, P, R, S

__all__ = [
    "Axis",
    "Container",
    "DistributedModule",
    "Generated",
    "GeneratedProgram",
    "I",
    "LoadedProgram",
    "OtherSizes",
    "P",
    "PlannedInput",
    "PlannedOutput",
    "R",
    "RegionCopy",
    "S",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "blockwise_attention",
    "chunked_attention",
    "convert",
    "gathered",
    "linear_cross_entropy",
    "local",
    "named_arguments",
    "recomputed",
    "reduce_scatter",
    "require_strided",
    "ring_attention",
    "split_batch_norm",
    "split_cumsum",
    "split_delta_scan",
    "split_group_norm",
    "split_layer_norm",
    "split_log_softmax",
    "split_logsumexp",
    "split_rms_norm",
    "split_selective_scan",
    "split_softmax",
    "split_updating_batch_norm",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "with_halo",
]
