"""The memory simulator: peak memory of a pipeline stage, by simulating the allocation and release of every tensor."""

from passes.cost.liveness.graph import (
    KINDS,
    BackwardProfile,
    Event,
    EventKind,
    Form,
    ForwardProfile,
    MemoryPeak,
    OperandGradient,
    Prober,
    ResultStorage,
    StorageRef,
    Task,
)
from passes.cost.liveness.peaks import PartPeak, StepPeaks
from passes.cost.liveness.step import MACHINES, Machine, MicroBatchInputs, Stored, peak_memory

__all__ = [
    "KINDS",
    "MACHINES",
    "BackwardProfile",
    "Event",
    "EventKind",
    "Form",
    "ForwardProfile",
    "Machine",
    "MemoryPeak",
    "MicroBatchInputs",
    "OperandGradient",
    "PartPeak",
    "Prober",
    "ResultStorage",
    "StepPeaks",
    "StorageRef",
    "Stored",
    "Task",
    "peak_memory",
]
