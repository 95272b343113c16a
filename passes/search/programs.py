"""The program of one micro-batch, for every number of micro-batches."""

from dataclasses import dataclass, field
from functools import cached_property

from passes.clock import Clock
from passes.ir.errors import MicroBatchError
from passes.ir.program import Folded, Program
from passes.micro_batches import Batch, MicroBatches
from passes.regions import fold
from passes.search.space import Space


@dataclass(frozen=True)
class MicroBatchProgram:
    """The program of one micro-batch, as it is and folded; `micro` is None where the batch is not split."""

    micro: MicroBatches | None
    program: Program
    folded: Folded


@dataclass
class MicroBatchPrograms:
    """The programs that `program` can be split into along its batch, each made once.

    Copies of a region share all decisions, so layers are folded together only where the constraints of `space` on them
    are equal. `refused` is the reason for which the batch cannot be split, once that is known.
    """

    program: Program
    space: Space
    clock: Clock
    refused: str = ""
    made: dict[int, MicroBatchProgram] = field(default_factory=dict)

    def of(self, count: int, *, is_given: bool) -> MicroBatchProgram | None:
        """The program of one of `count` micro-batches; None where the batch cannot be split.

        Raises MicroBatchError instead where the number `is_given` by the user.
        """
        if self.refused and count > 1 and not is_given:
            return None
        if count not in self.made:
            micro = None
            if count > 1:
                try:
                    with self.clock("micro-batches"):
                        micro = self._batch.cut(count)
                except MicroBatchError as error:
                    if is_given:
                        raise
                    self.refused = str(error)
                    return None
            program = self.program if micro is None else micro.program
            with self.clock("constrain"):
                constraints = self.space.placed_constraints(program, self.space.mesh)
            with self.clock("regions"):
                folded = fold(program, constraints.label)
            self.made[count] = MicroBatchProgram(micro, program, folded)
        return self.made[count]

    @cached_property
    def _batch(self) -> Batch:
        return Batch(self.program)
