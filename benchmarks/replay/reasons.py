"""Why a published run is not predicted: the whole list."""

from enum import Enum


class Reason(Enum):
    """One reason for leaving a record out."""

    MALFORMED = "the record cannot be read: fields are missing or are no numbers"
    DIMENSIONS = "the model's dimensions are not all published"
    PLAN = "the plan is not all published: micro-batch, batch or parallel sizes are missing"
    INCONSISTENT = "the published sizes contradict each other: the parallel sizes do not make the devices"
    NOT_MEASURED = "no measurement: neither a step time, a throughput nor a memory"
    FORMULA = "the figures are a formula of the source, no measurement"
    DEVICE = "there are no figures for the device"
    PRECISION = "the precision is not one that is planned (bf16 or fp16)"
    ADAPTERS = "adapters over frozen parameters, of unpublished rank and targets"
    PACKED = "short samples, packed: the lengths that attention sees are not published"
    EXPERTS = "tokens are dispatched to experts, which no rule splits yet"
    OFFLOADED = "what layers keep lies in the host's memory, which no plan offers"
    UNEVEN = "states are split unevenly, which no plan offers"
    MODEL = "no stock class has this model"
    FLOPS = "the FLOPs of the traced model differ by more than 1% from the record's"
    TRACE = "the model or its plan was refused by a pass"


class SkippedError(Exception):
    """Raised where a record cannot be predicted; says why."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value} ({detail})" if detail else reason.value)
        self.reason = reason
        self.detail = detail
