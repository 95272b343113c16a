"""The rewriter: copies a program op by op; later ops read the replacements of results. Values that do not depend on the
batch are computed here.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import replace

import torch

from passes.ir.arguments import Argument, Ref, bound_arguments, find_overload, references, rename
from passes.ir.program import Op, Program, TensorType, Update


class Rewriter:
    """Copies the ops of a program one after the other; later ops read the replacements of results.

    Parameters and inputs that are `kept` stay in the program, also where no output depends on their values.
    """

    def __init__(self, program: Program, kept: Set[str] = frozenset()) -> None:
        self.program = program
        self.kept = kept
        self.types = dict(program.types)
        self.ops: list[Op] = []
        self.replaced: dict[str, Argument] = {}
        self.count = 0
        self._makers: dict[str, Op] = {}
        self._noted = 0
        # Meanings of tensors that a rewrite found, for other ops that read them.
        self.meanings: dict[str, object] = {}

    def maker(self, name: str) -> Op | None:
        """The op written so far that makes a tensor; None for inputs, parameters and buffers."""
        for op in self.ops[self._noted :]:
            self._makers.update(dict.fromkeys(op.results, op))
        self._noted = len(self.ops)
        return self._makers.get(name)

    def depends(self, name: str, on: Set[str]) -> bool:
        """Whether a tensor is computed from one of those in `on`."""
        seen, ahead = {name}, [name]
        while ahead:
            found = ahead.pop()
            if found in on:
                return True
            op = self.maker(found)
            new = [] if op is None else [own for own in op.operands if own not in seen]
            seen.update(new)
            ahead.extend(new)
        return False

    def follow(self, argument: Argument) -> Argument:
        """`argument` with the replacements made so far."""
        return rename(argument, lambda name: self.replaced.get(name, Ref(name)))

    def current(self, op: Op) -> Op:
        """`op` with the replacements made so far."""
        return replace(op, arguments={name: self.follow(value) for name, value in op.arguments.items()})

    def type(self, argument: Argument) -> TensorType:
        """The type of a referred tensor."""
        assert isinstance(argument, Ref)
        return self.types[argument.name]

    def fresh(self, prefix: str) -> str:
        """A name that no other tensor has, those that an earlier rewriter made among them."""
        name = f"{prefix}{self.count}"
        while name in self.types:
            self.count += 1
            name = f"{prefix}{self.count}"
        self.count += 1
        return name

    def write(self, like: Op, target: str, type: TensorType, /, *args: Argument, **kwargs: Argument) -> Ref:
        """Write a new op where `like` stands, with one result of `type`."""
        arguments = bound_arguments(find_overload(target), args, kwargs)
        name = self.fresh(f"%{target.split('.')[1]}_n")
        self.types[name] = type
        self.ops.append(replace(like, target=target, arguments=arguments, results=(name,)))
        return Ref(name)

    def put(self, op: Op, value: Argument) -> None:
        """Write `op` as it is if `value` is KEEP; else later ops read `value` instead of its results."""
        if value is KEEP:
            self.ops.append(op)
        else:
            self.replaced.update(zip(op.results, value if isinstance(value, tuple) else (value,), strict=True))

    def finish(self, updates: tuple[Update, ...] | None = None) -> Program:
        """The rewritten program."""
        kept = self.program.updates if updates is None else updates
        return replace(
            self.program,
            ops=tuple(self.ops),
            types=self.types,
            outputs=tuple(self.follow(value) for value in self.program.outputs),
            updates=tuple(Update(update.buffer, next(references(self.follow(Ref(update.value))))) for update in kept),
        )


# A rewrite gives what the result of an op is replaced by (a tuple where it has several), or KEEP.
Rewrite = Callable[[Rewriter, Op], Argument]
KEEP: Argument = "<keep>"


def constant(rewriter: Rewriter, name: str) -> torch.Tensor | None:
    """The value of a result that depends on no input, parameter or buffer, computed here; None for any other."""
    needed: list[Op] = []
    wanted = {name}
    for op in reversed(rewriter.ops):
        if not wanted.isdisjoint(op.results):
            needed.append(op)
            wanted.update(op.operands)
    if not wanted <= {result for op in needed for result in op.results}:
        return None
    values: dict[str, torch.Tensor] = {}
    for op in reversed(needed):
        arguments = {key: concrete(value, values) for key, value in op.arguments.items()}
        if "device" in arguments:
            arguments["device"] = torch.device("cpu")
        result = op.overload(**arguments)
        values.update(zip(op.results, [result] if isinstance(result, torch.Tensor) else result, strict=True))
    return values[name]


def concrete(argument: Argument, values: Mapping[str, torch.Tensor]) -> object:
    """`argument` with tensors in place of the references to them."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [concrete(item, values) for item in argument]
    return argument
