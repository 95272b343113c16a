"""The errors that autopar raises on purpose. `autopar` exports them all; catch `AutoparError` for any of them."""


class AutoparError(Exception):
    """Base class: the message says in one sentence what is wrong, where, and what to do."""


class CacheError(AutoparError):
    """Generated source cannot be written to any folder."""


class CaptureError(AutoparError):
    """The model cannot be traced, or holds something that cannot be parallelized exactly."""


class CheckpointError(AutoparError, RuntimeError):
    """A state dict does not fit the model. (torch raises RuntimeError for this.)"""


class ClusterError(AutoparError):
    """A figure of a device, a link or a cluster is none that anything could run at."""


class ConstraintError(AutoparError):
    """A constraint matches nothing, contradicts another one, or cannot be met."""


class ExpressionError(AutoparError):
    """A plan has no formulas of its costs, or none can be given."""


class InfeasibleError(AutoparError):
    """No plan fits the memory limit; the smallest that was found lacks `missing` bytes per device."""

    def __init__(self, message: str, missing: float = 0.0) -> None:
        super().__init__(message)
        self.missing = missing


class InputError(AutoparError):
    """The inputs of a call are missing, additional, or of another shape or dtype than planned."""


class MeshError(AutoparError):
    """The device mesh is not one that a plan can be made for."""


class MicroBatchError(AutoparError):
    """The batch cannot be cut into micro-batches: sizes do not divide, or samples do not stand for themselves."""


class PlanMismatchError(AutoparError):
    """A plan belongs to another model, mesh or version, or the ranks hold different models."""


class RankFailedError(AutoparError):
    """Another rank raised, was interrupted, died, or does not answer in time."""


class UnsupportedError(AutoparError):
    """A distributed module, a part or a parameter of it is asked for something that it cannot do."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """The model has this method or attribute, but its distributed module does not, as `hasattr` says too."""
