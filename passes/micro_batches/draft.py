"""The program of one micro-batch while it is written: placements of its tensors on the axis of micro-batches, and what
one micro-batch computes of pending sums without the others.

A term of the loss that is no sum over the samples, as the balance of experts is (a product of two means over the
batch), may be computed in each micro-batch for its own samples, and averaged over micro-batches. Then each sum over the
samples that such a term reads stands for that of the whole batch: it is multiplied by the number of micro-batches,
because sizes that a trace has as numbers are those of the whole batch.
"""

from collections.abc import Mapping
from dataclasses import replace

from passes._torch import pytree
from passes.ir.arguments import Argument, Ref, rename
from passes.ir.layout import P, Placement, R, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import Op, Program, TensorType, differentiable, without_unused
from passes.rules import find_rule, signature

# Ops that make a tensor of zeros, by the argument that must be zero.
_ZEROS = {"zeros": None, "full": "fill_value"}


class Calls:
    """Properties of a program that do not depend on the number of micro-batches.

    By first results of ops: `alike` are their signatures, which repeated layers share, `rules` their rules. `makers`
    are the ops that make tensors, `flowing` the tensors that a gradient flows through, `weighed` those that depend on
    parameters.
    """

    def __init__(self, program: Program) -> None:
        self.alike = {op.results[0]: signature(op, program.types) for op in program.ops}
        first = {self.alike[op.results[0]]: op for op in program.ops}
        found = {key: find_rule(op, program.types, program.rules) for key, op in first.items()}
        self.rules = {name: found[key] for name, key in self.alike.items()}
        self.makers = {name: op for op in program.ops for name in op.results}
        self.flowing = differentiable(program)
        self.weighed = {item.name for item in program.parameters}
        for op in program.ops:
            if any(name in self.weighed for name in op.operands):
                self.weighed.update(op.results)


class Draft:
    """The program of one of `ways` micro-batches of `program`, op by op.

    `types` are those of the whole batch; those of the micro-batch follow from `placements`. Tensors in `apart` are `R`
    in their placement, and have another value in each micro-batch. `ops` are by first result what each op of the
    program becomes: what a later op wants stands where the whole was made, because between two ops of a layer it would
    set it apart from its like. A gradient flows through `flowing`.
    """

    def __init__(
        self, program: Program, makers: Mapping[str, Op], inputs: Mapping[str, Placement], flowing: set[str], ways: int
    ) -> None:
        self.program = program
        self.makers = makers
        self.ways = ways
        self.mesh = Mesh(("micro_batch",), (ways,))
        self.types = dict(program.types)
        self.placements: dict[str, Placement] = {name: inputs.get(name, R) for name in program.types}
        self.flowing = flowing
        self.apart: set[str] = set()
        # Tensors that depend on totals of the whole batch.
        self.totaled: set[str] = set()
        self.ops: dict[str, list[Op]] = {op.results[0]: [] for op in program.ops}
        # By pending sum what one micro-batch has of it, and by tensor that is apart its share of the mean.
        self._alone: dict[str, str] = {}
        self._shares: dict[str, str] = {}

    def local(self, name: str) -> TensorType:
        """The type of a tensor in one micro-batch."""
        type = self.types[name]
        return replace(type, shape=local_shape(type.shape, (self.placements[name],), self.mesh))

    def named(self, name: str, type: TensorType, placement: Placement) -> str:
        """A new tensor."""
        assert name not in self.types, name
        self.types[name], self.placements[name] = type, placement
        return name

    def is_zero(self, name: str) -> bool:
        """Whether a tensor is made of zeros, which are a sum of zeros, too."""
        op = self.makers.get(name)
        if op is None or op.operands or op.kind not in _ZEROS:
            return False
        value = _ZEROS[op.kind]
        return value is None or op.arguments[value] in (0, 0.0, False)

    def alone(self, name: str) -> str | None:
        """A tensor as one micro-batch alone computes it: `R`, and apart unless it is the same in all of them. None
        where it depends on single samples otherwise than by sums over them."""
        if self.placements[name] == R and name not in self.totaled:
            return name
        op = self.makers.get(name)
        if self.placements[name].kind == "S" or op is None:
            return None
        if name not in self._alone:
            known = self.totaled | self.apart
            sums = [own for own in op.operands if self.placements[own] == P or own in known]
            if sums and any(self.placements[own].kind == "S" for own in op.operands):
                return None
            made = self._again(op) if sums else self._scaled(op, name)
            if made is None:
                return None
            self._alone.update(made)
        return self._alone[name]

    def _scaled(self, op: Op, name: str) -> dict[str, str]:
        """A sum over the samples of this micro-batch, in place of that over all."""
        return {name: self._times(op, name, "alone", "aten.mul.Scalar", R)}

    def _again(self, op: Op) -> dict[str, str] | None:
        """The results of an op on what the micro-batch has of its operands."""
        names = [self.alone(own) for own in op.operands]
        known = [own for own in names if own is not None]
        if len(known) < len(names):
            return None
        slots = iter(known)
        arguments = {item: rename(value, lambda _: Ref(next(slots))) for item, value in op.arguments.items()}
        made = {own: self.named(f"{own}_alone", self.types[own], R) for own in op.results}
        again = replace(op, arguments=arguments, results=tuple(made.values()), key=f"{op.key}.alone")
        self.ops[op.results[0]].append(again)
        for own, found in made.items():
            self.apart.add(found)
            if own in self.flowing:
                self.flowing.add(found)
        return made

    def shared(self, name: str) -> str | None:
        """This micro-batch's share of the mean over micro-batches of a tensor that is apart; None for what has no
        mean."""
        op = self.makers.get(name)
        if op is None or not self.types[name].dtype.is_floating_point:
            return None
        if name not in self._shares:
            self._shares[name] = self._times(op, name, "share", "aten.div.Scalar", P)
        return self._shares[name]

    def _times(self, op: Op, name: str, suffix: str, target: str, placement: Placement) -> str:
        """A tensor multiplied or divided by the number of micro-batches."""
        found = self.named(f"{name}_{suffix}", self.types[name], placement)
        arguments: dict[str, Argument] = {"self": Ref(name), "other": self.ways}
        times = replace(op, target=target, arguments=arguments, results=(found,), key=f"{op.key}.{suffix}")
        self.ops[op.results[0]].append(times)
        if placement == R:
            self.apart.add(found)
        if name in self.flowing:
            self.flowing.add(found)
        return found


def totals_program(whole: Program, totals: Mapping[str, str]) -> Program:
    """The program of `totals`, by tensor of `whole`, over those inputs and buffers that it reads."""
    outputs = tuple(Ref(name) for name in totals)
    found = without_unused(replace(whole, outputs=outputs, changes=(), output_names=tuple(totals.values())))
    read = {name for op in found.ops for name in op.operands}
    inputs = tuple(item for item in found.inputs if item.name in read)
    kept = {item.name for item in inputs} | {name for op in found.ops for name in op.results}
    buffers = tuple(item for item in found.buffers if item.name in read)
    kept |= {item.name for item in buffers} | set(found.constants)
    return replace(
        found,
        inputs=inputs,
        parameters=(),
        buffers=buffers,
        output_tree=pytree.tree_structure(outputs),
        types={name: type for name, type in found.types.items() if name in kept},
    )
