"""The program of one micro-batch, for every number of them."""

from dataclasses import dataclass, field
from functools import cached_property

from autopar.clock import Clock
from autopar.request import Request
from passes.constrain import constrain
from passes.ir.errors import MicroBatchError
from passes.ir.program import Folded, Program
from passes.micro_batches import Batch, MicroBatches
from passes.regions import fold


@dataclass(frozen=True)
class Part:
    """The program of one micro-batch (`micro` is None for the whole batch), folded."""

    micro: MicroBatches | None
    program: Program
    folded: Folded


@dataclass
class Pieces:
    """What the batch of `program` can be cut into; `refused` says why it stays in one piece. Layers are alike of which
    the `request` demands the same."""

    program: Program
    request: Request
    clock: Clock
    refused: str = ""
    parts: dict[int, Part] = field(default_factory=dict)

    def of(self, count: int, is_asked: bool) -> Part | None:
        """The program of one of `count` micro-batches; None where the graph does not show that the batch may be cut.

        Raises MicroBatchError for that where so many are asked for.
        """
        if self.refused and count > 1 and not is_asked:
            return None
        if count not in self.parts:
            micro = None
            if count > 1:
                try:
                    micro = self.clock("micro-batches", lambda: self._batch.cut(count))
                except MicroBatchError as error:
                    if is_asked:
                        raise
                    self.refused = str(error)
                    return None
            program = self.program if micro is None else micro.program
            demands = constrain(program, self.request.constraints, self.request.mesh)
            self.parts[count] = Part(micro, program, self.clock("regions", lambda: fold(program, demands.label)))
        return self.parts[count]

    @cached_property
    def _batch(self) -> Batch:
        """The batch, to be cut."""
        return Batch(self.program)
