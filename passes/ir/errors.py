"""The exceptions that autopar raises. `autopar` exports them all; catch `AutoparError` for any of them."""


class AutoparError(Exception):
    """Base class. The message is one sentence: the problem, its location, and its remedy."""


class CacheError(AutoparError):
    """Generated source cannot be written to any folder."""


class CaptureError(AutoparError):
    """The model cannot be traced, or contains an operation that cannot be parallelized exactly."""


class CheckpointError(AutoparError, RuntimeError):
    """A state dict does not fit the model. (torch raises RuntimeError for this.)"""


class ClusterError(AutoparError):
    """A figure of a device, a link or a cluster is out of range, or a cluster file cannot be read."""


class ConstraintError(AutoparError):
    """A constraint matches nothing, contradicts another one, or cannot be met."""


class ExpressionError(AutoparError):
    """A plan has no cost formulas, or they cannot be derived."""


class InfeasibleError(AutoparError):
    """No plan fits the memory limit; the smallest plan that was found exceeds it by `missing` bytes per device."""

    def __init__(self, message: str, missing: float = 0.0) -> None:
        super().__init__(message)
        self.missing = missing


class InputError(AutoparError):
    """The inputs of a call are missing, unexpected, or of another shape or dtype than planned."""


class MeshError(AutoparError):
    """The device mesh does not support a plan."""


class MicroBatchError(AutoparError):
    """The batch cannot be split into micro-batches: sizes do not divide, or samples depend on each other."""


class PipelineError(AutoparError):
    """A pipeline cannot be built as requested: its stages, cuts, schedule or micro-batches do not fit the program."""


class PlanMismatchError(AutoparError):
    """A plan belongs to another model, mesh or version, or the ranks hold different models."""


class RankFailedError(AutoparError):
    """Another rank raised, was interrupted, died, or did not answer in time."""


class UnsupportedError(AutoparError):
    """A distributed module, or a submodule or parameter of it, does not support the operation."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """The model has this method or attribute, but its distributed module does not, as `hasattr` says too."""
