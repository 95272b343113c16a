"""The variables of one generated function."""

from collections.abc import Collection, Iterable, Sequence

from passes.ir.lowered import Body, Compute, Loop, Redistribution
from passes.ir.program import Op
from passes.ir.variables import LoopVariables
from passes.ir.vocabulary import identifier, numbered, plain
from passes.variables.names import Names

_SUFFIXES = {
    "all_gather": "gathered",
    "all_reduce": "reduced",
    "all_to_all": "exchanged",
    "reduce_scatter": "scattered",
    "convert": "converted",
}


class Function:
    """Follows the statements of a body and gives their results variables, in `names`.

    `stored` are parameters, buffers and constants by the names that the body reads them under; they have no variables.
    With `inner` the body is that of a region; otherwise parameters are gathered around the ops with the keys
    `gathering`. `loops` collects the variables that loops assign, and `calls` names for the arguments of the functions
    that they call.
    """

    def __init__(
        self, body: Body, names: Names, stored: Collection[str], *, inner: bool, gathering: Collection[str] = ()
    ) -> None:
        self.names = names
        self.loops: list[LoopVariables] = []
        self.calls: list[list[str]] = []
        self._body = body
        self._stored = stored
        self._weights = body.redistributed_parameters
        self._inner = inner
        self._gathering = gathering

    def follow(self) -> None:
        """Follow all statements."""
        for position, statement in enumerate(self._body.statements):
            self.names.position = position
            if isinstance(statement, Compute):
                self._compute(statement)
            elif isinstance(statement, Redistribution):
                self._change(statement)
            else:
                self._loop(statement)
            self.names.release()

    def _compute(self, statement: Compute) -> None:
        op = statement.op
        if statement.recomputed:
            self.names.lambdas[op.results[0]] = self._lambda(op.operands)
        elif op.key in self._gathering:
            given = [value for value in op.operands if value not in self._stored and value not in self._weights]
            self.names.lambdas[op.results[0]] = self._lambda(given)
        for value in op.results:
            self.names.result(op.kind, value, self._candidates(op, value))

    def _lambda(self, operands: Iterable[str]) -> dict[str, str]:
        """The parameters of a lambda that takes `operands`: variables keep their names."""
        chosen: dict[str, str] = {}
        for value in dict.fromkeys(operands):
            text = None if value in self._stored else self.names.text(value)
            is_variable = text is not None and text.isidentifier()
            base = text if text is not None and is_variable else identifier(value.replace("~", "_").rsplit(".", 1)[-1])
            chosen[value] = numbered(base, lambda name: name in chosen.values() or self.names.is_reserved(name))
        return chosen

    def _candidates(self, op: Op, value: str) -> list[str]:
        """Operands whose variable `value` may take over: no parameters; of several operands those of its type."""
        types = self._body.types
        alone = len(op.operands) == 1
        return [
            operand
            for operand in op.operands
            if operand not in self._stored
            and operand not in self._weights
            and (op.kind == "to" or types[operand].dtype == types[value].dtype)
            and (alone or types[operand].shape == types[value].shape)
        ]

    def _change(self, change: Redistribution) -> None:
        """Name the result of a redistribution. A parameter that is gathered around a single op gets no variable."""
        if (change.unit_steps and not self._inner) or self.names.take_over(change.result, change.source):
            return
        base = identifier("_".join(change.source.split(".")[-2:]))
        if not change.parameter:
            suffix = _SUFFIXES[change.steps[-1].collective]
            base = f"{identifier(self.names.text(change.source) or base)}_{suffix}"
        self.names.assign(self.names.fresh(base), change.result)

    def _loop(self, loop: Loop) -> None:
        """Name what a loop assigns.

        A carried value stays in one variable. Of a result that is read after the loop, the last copy's stays in a
        variable; where an earlier copy's is read, a list has those of all copies.
        """
        names, region = self.names, loop.region
        for carry, initial in zip(region.carries, loop.initial, strict=True):
            if not names.take_over(carry.argument, initial):
                names.assign(names.fresh("hidden"), carry.argument)
        carried = [names.of[carry.argument] for carry in region.carries]
        self.calls.append([*map(plain, carried), *map(self._argument, loop.shared)])
        last = {carry.next: name for carry, name in zip(region.carries, carried, strict=True)}
        every: dict[str, str] = {}
        for value, outside in loop.exports:
            if value not in last:
                last[value] = names.fresh(identifier(value))
            if any(outer is not None for outer in outside[:-1]):
                every[value] = names.fresh(f"every_{identifier(value)}")
        for value, outside in loop.exports:
            self._export(outside, last[value], every.get(value))
        self.loops.append(LoopVariables(last, every))

    def _export(self, outside: Sequence[str | None], last: str, every: str | None) -> None:
        """Let the values `outside`, one per copy, be elements of the list `every`, or the variable `last` hold the one
        of the last copy."""
        used = {copy: outer for copy, outer in enumerate(outside) if outer is not None}
        if every is None:
            self.names.of.update(dict.fromkeys(used.values(), last))
        else:
            self.names.elements.update({outer: (every, copy) for copy, outer in used.items()})
        if used:
            self.names.live[every or last] = max(used.values(), key=self.names.last)

    def _argument(self, value: str) -> str:
        """The name of a region's argument for a value that all copies read."""
        name = self.names.text(value) or value
        return plain(name) if name.isidentifier() else identifier(name.partition("~")[0])
