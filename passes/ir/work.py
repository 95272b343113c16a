"""The work of a step, and the devices that do none of it, as a plan has them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The work of a step on all `devices` together, whatever its plan.

    `samples` and `tokens` are those of the batch; a model without tokens has 0. `flops` are model FLOPs: matrix
    products and attention of the forward and the backward pass, without recompute, a multiply-add counted as two,
    causal attention as half. `peak_s` are the seconds that one device takes for them at the peak of the dtype of each
    product.
    """

    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    peak_s: float = 0.0
    devices: int = 1

    def per_device(self, amount: float, step_s: float) -> float:
        """`amount` per second and device of a step that takes `step_s`."""
        return amount / (step_s * self.devices) if step_s else 0.0


@dataclass(frozen=True)
class IdleAxes:
    """Mesh `axes` that split next to nothing of the computation: `busy` is the number of devices that would compute as
    fast.

    `batches` are the sizes of the batch next to the planned one, below and above, that the idle axes could split.
    `fewer` is a smaller number of devices whose step, with a searched mesh, takes `fewer_s`; 0 where none was found to
    be as fast.
    """

    axes: tuple[str, ...]
    busy: int
    batches: tuple[int, ...] = ()
    fewer: int = 0
    fewer_s: float = 0.0
