"""What generated code calls, and the module around it."""

from autopar.runtime.axis import Axis
from autopar.runtime.collectives import all_gather, all_reduce, all_to_all, convert, reduce_scatter
from autopar.runtime.forms import causal_attention, vocabulary_cross_entropy, vocabulary_embedding
from autopar.runtime.module import (
    CompiledProgram,
    Container,
    DistributedModule,
    Generated,
    LoadedProgram,
    PlannedInput,
    PlannedOutput,
    Region,
    local,
    named_arguments,
)
from passes.ir.layout import I, P, R, S

__all__ = [
    "Axis",
    "CompiledProgram",
    "Container",
    "DistributedModule",
    "Generated",
    "I",
    "LoadedProgram",
    "P",
    "PlannedInput",
    "PlannedOutput",
    "R",
    "Region",
    "S",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "causal_attention",
    "convert",
    "local",
    "named_arguments",
    "reduce_scatter",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
]
