"""Seconds of a step, composed from those of its parts: repetitions, and the overlap of parameter communication.

While one copy of a region computes, the parameters of the next one are gathered, and in the backward pass the gradients
of the one before are reduced (prefetch, as FSDP does it: Zhao et al. 2023, section 3.3). Of n copies the traffic of one
is always exposed: there is no computation before the first gather, nor after the last reduction. Only computation hides
it; collectives between ops of the region do not, as they may use the same link. The overlap budget is the computation
of a device without redundant computation, so that it does not depend on the strategies: a plan cannot hide traffic by
computing more.

Collectives take some multiprocessors from the computation beside them. While a `share` of them is taken, computation is
slower by that share, so of a second that is hidden this share is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from passes.ir.configuration import Configuration
from passes.ir.figures import largest


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block of a program in one micro-batch, its copies together: they are some of `count` copies of a
    region that run one after the other.

    `exchange` are the all-to-alls that run once before a forward pass: they bring parameters to the layout that is
    gathered. `gather` is the gathering of parameters in the forward pass, `regather` their regathering in the
    backward pass, `reduce` the reduction of their gradients. `recompute` is the computation of the forward pass that
    the backward pass repeats; repeated collectives count as communication of the backward pass. `cover` and
    `cover_backward` are the computation that hides traffic, forward and backward. `weight` is the part of
    `backward_compute` for gradients of weights that are computed apart (see `passes.lower.deferred`).
    """

    count: int = 1
    forward_compute: float = 0.0
    backward_compute: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    recompute: float = 0.0
    exchange: float = 0.0
    gather: float = 0.0
    regather: float = 0.0
    reduce: float = 0.0
    cover: float = 0.0
    cover_backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: "BlockSeconds") -> "BlockSeconds":
        return BlockSeconds(self.count, *(getattr(self, name) + getattr(other, name) for name in _SUMMED))

    def __mul__(self, times: float) -> "BlockSeconds":
        return BlockSeconds(self.count, *(getattr(self, name) * times for name in _SUMMED))


_SUMMED = tuple(item.name for item in fields(BlockSeconds) if item.name != "count")


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by category, on the ranks that are busy longest; `bubble` is the time that these wait for other
    pipeline stages. `hidden_communication` overlaps the others and is no part of `total`."""

    forward_compute: float = 0.0
    backward_compute: float = 0.0
    recompute: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    exposed_gathers: float = 0.0
    exposed_reductions: float = 0.0
    inputs: float = 0.0
    optimizer: float = 0.0
    bubble: float = 0.0
    hidden_communication: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.spent().values())

    def spent(self) -> dict[str, float]:
        """The seconds that make up the step, under names for printing."""
        return {
            item.name.replace("_", " "): getattr(self, item.name)
            for item in fields(self)
            if item.name != "hidden_communication"
        }


@dataclass(frozen=True)
class Window:
    """Parameter communication of one pass over a block, `times` in a step: gathers of a forward pass (`gather`),
    gathers of a backward pass (`regather`) and reductions (`reduce`). Computation of the forward or of the `backward`
    pass hides it, unless it runs `alone`, after the step."""

    times: int
    gather: bool = False
    regather: bool = False
    reduce: bool = False
    alone: bool = False

    @property
    def backward(self) -> bool:
        """Whether it is sent in the backward pass."""
        return not self.gather

    def cover(self, part: BlockSeconds) -> float:
        """Seconds of computation of a block that hide it."""
        return 0.0 if self.alone else part.cover_backward if self.backward else part.cover


def windows(configuration: Configuration) -> tuple[Window, ...]:
    """All windows of a step: the first micro-batch gathers, the last reduces, the others do both as the configuration
    says. Where gradients of weights are computed apart, all are reduced after the step."""
    times = configuration.micro_batches
    gathers, reductions = (1 if once else times for once in (configuration.gather_once, configuration.reduce_once))
    regather = not configuration.gather_once
    if configuration.pipeline.splits:
        after = Window(1, reduce=True, alone=True)
        return Window(gathers, gather=True), *((Window(times, regather=True),) if regather else ()), after
    found = (
        Window(gathers, gather=True),
        Window(reductions, regather=regather, reduce=True),
        Window(times - reductions, regather=regather),
    )
    return tuple(window for window in found if window.times and (window.gather or window.regather or window.reduce))


def exchanges(configuration: Configuration) -> int:
    """The number of times that `BlockSeconds.exchange` runs in a step."""
    return 1 if configuration.gather_once else configuration.micro_batches


def uncovered(count: int) -> tuple[float, float]:
    """Split the traffic of a block with `count` copies: the part that is always exposed, and the part that computation
    can hide."""
    return 1 / count, (count - 1) / count


def exposed(traffic: float, cover: float, count: int, share: float = 0.0) -> float:
    """Seconds of `traffic` that `cover` seconds of computation do not hide, both of the same copies among `count` that
    run one after the other, and the slowdown of that computation in seconds."""
    first, others = uncovered(count)
    alone = share * traffic + (1 - share) * largest(0.0, traffic - cover)
    return traffic * first + alone * others


def compose(
    parts: Sequence[BlockSeconds], configuration: Configuration, inputs: float, optimizer: float, share: float = 0.0
) -> Seconds:
    """The step whose micro-batches consist of `parts`; `inputs` and `optimizer` are seconds of the whole step, `share`
    is the fraction of a device that collectives occupy."""
    times = configuration.micro_batches
    gathers = traffic = exchanges(configuration) * sum(part.exchange for part in parts)
    reductions = 0.0
    for part in parts:
        for window in windows(configuration):
            sent = window.gather * part.gather + window.regather * part.regather + window.reduce * part.reduce
            seconds = window.times * exposed(sent, window.cover(part), part.count, share)
            traffic += window.times * sent
            if window.backward:
                reductions += seconds
            else:
                gathers += seconds
    return Seconds(
        times * sum(part.forward_compute for part in parts),
        times * sum(part.backward_compute for part in parts),
        times * sum(part.recompute for part in parts),
        times * sum(part.forward_communication for part in parts),
        times * sum(part.backward_communication for part in parts),
        gathers,
        reductions,
        inputs,
        optimizer,
        0.0,
        largest(0.0, traffic - gathers - reductions),
    )


@dataclass(frozen=True)
class Phases:
    """Seconds of one pipeline stage: of the forward and of the backward pass of one micro-batch, of its gradients of
    weights that are computed apart, and of what a step does once, before the first and after the last of them."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    before: float = 0.0
    after: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the passes of one micro-batch."""
        return self.forward + self.backward + self.weight

    def __add__(self, other: "Phases") -> "Phases":
        return Phases(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
            self.before + other.before,
            self.after + other.after,
        )

    def __mul__(self, times: float) -> "Phases":
        return Phases(
            self.forward * times,
            self.backward * times,
            self.weight * times,
            self.before * times,
            self.after * times,
        )


def phases(
    parts: Sequence[BlockSeconds], configuration: Configuration, inputs: float, optimizer: float, share: float = 0.0
) -> Phases:
    """The same seconds as `compose` adds up, by the phase of a step that they are spent in."""
    times, found = configuration.micro_batches, Phases(before=inputs, after=optimizer)
    for part in parts:
        found += Phases(
            part.forward_compute + part.forward_communication,
            part.backward_compute - part.weight + part.recompute + part.backward_communication,
            part.weight,
        )
        exchange = part.exchange
        found += Phases(before=exchange) if configuration.gather_once else Phases(forward=exchange)
        for window in windows(configuration):
            sent = window.gather * part.gather + window.regather * part.regather + window.reduce * part.reduce
            seconds = exposed(sent, window.cover(part), part.count, share)
            if window.alone or (window.times == 1 and times > 1):
                found += Phases(after=seconds) if window.backward else Phases(before=seconds)
            else:
                each = seconds * window.times / times
                found += Phases(backward=each) if window.backward else Phases(forward=each)
    return found
