"""The sizes of inputs that are not fixed in a trace, as symbols."""

from collections.abc import Sequence
from typing import cast

import sympy
import torch

from passes._torch import ShapeEnv
from passes.ir.errors import CaptureError
from passes.ir.program import Program
from passes.ir.sizes import as_number

_SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool


class Symbols:
    """The sizes of inputs that are not fixed in a trace, as symbols that say which dim they are."""

    def __init__(self) -> None:
        self.named: dict[sympy.Symbol, sympy.Symbol] = {}
        self.environment: ShapeEnv | None = None

    def name(self, inputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give names to the symbols in the sizes of the inputs: that of the first dim that is the symbol."""
        sizes = {
            f"{name}.{dim}": size.node
            for name, tensor in inputs
            for dim, size in enumerate(cast(Sequence[object], tensor.shape))
            if isinstance(size, torch.SymInt)
        }
        for name, node in sorted(sizes.items(), key=lambda item: not item[1].expr.is_Symbol):
            self.environment = node.shape_env
            for symbol in sorted(node.expr.free_symbols - set(self.named), key=str):
                own = name if node.expr.is_Symbol else f"{name} ({symbol})"
                self.named[symbol] = sympy.Symbol(own, integer=True, positive=True)

    def knows(self, value: object) -> bool:
        """Whether `value` is a number that follows from sizes of inputs alone."""
        return isinstance(value, _SymbolicNumber) and value.node.expr.free_symbols <= set(self.named)

    def written(self, value: object) -> object:
        """Such a number as an expression of the named symbols, or as the number that it always is."""
        assert isinstance(value, _SymbolicNumber)
        return as_number(value.node.expr.xreplace(self.named))

    def ranges(self, exported: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
        """The lower and upper bound of each symbol."""
        found = {}
        for symbol, name in self.named.items():
            allowed = exported.range_constraints[symbol]
            most = int(allowed.upper) if allowed.upper.is_Integer else None
            found[str(name)] = (int(allowed.lower), most)
        return found

    def conditions(self, program: Program) -> tuple[object, ...]:
        """Guards of the trace and assertions of the model, as conditions on the named symbols."""
        asserted = [value for op in program.ops if op.kind == "_assert_scalar" for value in op.arguments.values()]
        found: dict[object, None] = {value: None for value in asserted if isinstance(value, sympy.Basic)}
        if self.environment is None:
            return tuple(found)
        for guard in self.environment.guards:
            condition = self.environment.replace(guard.expr)
            if not condition.free_symbols <= set(self.named):
                raise CaptureError(f"the trace depends on {condition}, which is no size of an input")
            if condition != sympy.true:
                found[condition.xreplace(self.named)] = None
        return tuple(found)
