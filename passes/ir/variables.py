"""Variables of the generated code, by the values that they hold. The memory simulator and code generation read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FunctionVariables:
    """Variables of one generated function.

    - `names`: the variable that holds a value. Several values share a variable, one after the other: a value is gone
      when its variable is assigned again.
    - `elements`: values that are elements of a list, as (variable of the list, index).
    - `lambdas`: for an op that is computed by a lambda, by its first result: the lambda's parameters by operand. The
      backward pass recomputes such an op, or parameters are gathered around it.

    Parameters, buffers and constants have no variable, nor has a parameter that is gathered around a single op.
    """

    names: Mapping[str, str]
    elements: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    lambdas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text(self, value: str) -> str | None:
        """The expression that reads a value: its variable, or the element of a list; None where it has neither."""
        if value in self.elements:
            variable, index = self.elements[value]
            return f"{variable}[{index}]"
        return self.names.get(value)


@dataclass(frozen=True)
class LoopVariables:
    """Variables that a loop over the copies of a region assigns, by results of the region's body.

    `last` has one for every result: it holds that of the copy that ran last. `every` has the lists that collect a
    result of all copies; only a result of which an earlier copy's is used after the loop has one.
    """

    last: Mapping[str, str]
    every: Mapping[str, str]


@dataclass(frozen=True)
class Variables:
    """Variables of all functions of a generated module.

    `whole` are those of the whole program's function, `regions` those of each region's, in the order of the loops, and
    `loops` those that each loop assigns in the whole program's function. `returned` are the variables in which outputs
    are copied, by name, before the buffers that they are read from change.
    """

    whole: FunctionVariables
    regions: tuple[FunctionVariables, ...] = ()
    loops: tuple[LoopVariables, ...] = ()
    returned: Mapping[str, str] = field(default_factory=dict)
