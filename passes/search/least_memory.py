"""Lower bounds on the bytes of a program on any mesh of so many devices, before its strategies there are made.

Parameters with their states, buffers, inputs, outputs and saved tensors take at least 1/n of their bytes on the busiest
of n devices. So the peak there is at least 1/n of what they take at their peak on one device. What an op holds for
itself depends on its local form, and counts nothing.
"""

from dataclasses import dataclass, field, replace

from passes.cost.memory import TensorUses, find_tensor_uses, memory_model
from passes.ir.choices import Node, Problem
from passes.ir.configuration import Configuration
from passes.ir.mesh import Mesh
from passes.search.subproblems import Subproblems

_ONE = Mesh(("device",), (1,))


@dataclass
class LeastMemory:
    """Lower bounds on the bytes of choices for the program of `subproblems`. The problems of one device are kept, by
    the number of micro-batches."""

    subproblems: Subproblems
    alone: dict[int, tuple[Problem, list[TensorUses]]] = field(default_factory=dict)

    def bytes(self, configuration: Configuration) -> float:
        """A lower bound on the peak bytes of one device of the mesh of a configuration, whatever the layouts."""
        problem, uses = self._alone(configuration.micro_batches)
        model = memory_model(problem, replace(configuration, mesh=_ONE), uses)
        return float(model.least_totals().max()) / configuration.mesh.size

    def _alone(self, count: int) -> tuple[Problem, list[TensorUses]]:
        if count not in self.alone:
            space = replace(self.subproblems.space, mesh=_ONE, constraints={})
            problem = self.subproblems.over(space).problem(_ONE, self.subproblems.programs.given(count))
            problem = replace(problem, nodes=[_without_own(node) for node in problem.nodes])
            self.alone[count] = problem, find_tensor_uses(problem, _ONE)
        return self.alone[count]


def _without_own(node: Node) -> Node:
    """A node without what it holds for itself: temporaries, and tensors that autograd saves which are no results."""
    memory = tuple(replace(each, transient=0.0) for each in node.memory)
    return replace(node, memory=memory, copies=())
