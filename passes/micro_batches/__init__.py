"""micro_batches: derives the program of one micro-batch from a program in normal form.

Micro-batches are treated as ranks of one more axis. The inputs are split along their batch, parameters are `R`, and the
sharding rules determine the placement of every tensor: `S` has a part for each micro-batch, `P` is a sum over them, `R`
is the same in all. Micro-batches run one after the other, so nothing can be sent between them while they run. An op
that needs the whole batch therefore cannot run in one micro-batch, with one exception: a sum over the batch that
follows from the inputs alone, such as the number of labels that count. These *totals* come from a program of their own,
which runs before all others, and are inputs of the program of one micro-batch. Rows that replace placeholders are
counted in each micro-batch by itself (`placeholders`), for batches that allow it: that program checks this, too.

So the loss is a sum over the samples (`P`), and the gradients of all micro-batches add up to those of the whole batch.
Sizes that a trace has as numbers are those of the whole batch, so a mean divides by the size of the whole batch.

A term of the loss that couples the samples (the balance of experts) is refused, or computed in each micro-batch for its
own samples and averaged over them, where that is asked for (`draft`).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod

from passes.ir.arguments import Argument, Ref, references, rename
from passes.ir.choices import Strategy
from passes.ir.errors import MicroBatchError
from passes.ir.layout import P, Placement, R, S, Shape, fits, local_shape
from passes.ir.program import (
    Input,
    Op,
    Program,
    draws,
    has_linear_gradients,
    without_unused,
)
from passes.ir.rule import Dims, Role, Rule
from passes.micro_batches.draft import Calls, Draft, totals_program
from passes.micro_batches.placeholders import can_number, numbered, placeholders, unmatched
from passes.rules import signature
from passes.rules.strategies import Choice, digit, local_arguments, on_part, passing, split

# Ops that create a constant or random tensor, which can have any other size.
_MADE = {"zeros", "ones", "full", "empty", "rand", "randn"}


@dataclass(frozen=True)
class MicroBatches:
    """The batch in `count` micro-batches of `samples` each.

    `program` is that of one micro-batch. Its last inputs are the totals, which the outputs of `totals` (of one
    micro-batch too) sum to; None where there are none. `inputs` are the placements of the others: `S(dim)`, or `R` for
    inputs that every micro-batch gets whole. `outputs` are those of the leaves: `S` concatenated, `P` summed, `R` equal
    in all. `loss` is the leaf that is the loss. `checks` say what is wrong with a batch for which a further output of
    `totals`, after the totals, is not zero. `coupled` are the ops that couple samples, and are computed in each
    micro-batch for its own: what depends on them is averaged over micro-batches.
    """

    count: int
    samples: int
    program: Program
    totals: Program | None
    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]
    loss: int
    coupled: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()


def micro_batches(program: Program, count: int, *, couples: bool = False) -> MicroBatches:
    """Split the batch of `program`, which is in normal form, into `count` parts. With `couples`, terms of the loss that
    couple samples are computed in each micro-batch for its own, and averaged.

    Raises MicroBatchError if the batch does not divide, or if the rules do not show that the loss is a sum over the
    samples, given totals of the inputs: the message names the op that needs the whole batch.
    """
    return Batch(program, couples=couples).cut(count)


class Batch:
    """The batch of a program, to be split in several ways, with the properties that these share; `couples` as for
    `micro_batches`."""

    def __init__(self, program: Program, *, couples: bool = False) -> None:
        self.program = program
        self.couples = couples
        self.size = batch_size(item.type.shape for item in program.inputs)

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self.program)

    @cached_property
    def _samples(self) -> MicroBatches | str:
        """Micro-batches of one sample each, or why there are none."""
        return self._ways(self.size)

    def _ways(self, count: int) -> MicroBatches | str:
        try:
            return _Cutter(self.program, self._calls, count, couples=self.couples).run()
        except _WholeBatchError as error:
            return str(error)

    def cut(self, count: int) -> MicroBatches:
        """Split it into `count` parts; see `micro_batches`."""
        check_divides(self.size, count)
        if count == 1:
            raise MicroBatchError("one micro-batch is the whole batch: nothing is cut")
        # The assignment of samples to micro-batches must not matter.
        found = self._samples
        if count != self.size and not isinstance(found, str):
            found = self._ways(count)
        if isinstance(found, str):
            raise MicroBatchError(
                f"the batch cannot be cut into {count} micro-batches, because it is not shown that the loss is a sum "
                f"over the samples: {found}; use one micro-batch"
            )
        return found


def check_divides(batch: int, count: int) -> None:
    """Raise MicroBatchError for a number of micro-batches that does not divide a batch."""
    if batch % count:
        raise MicroBatchError(
            f"a batch of {batch} cannot be cut into {count} micro-batches: choose a number that divides it"
        )


def divisors(batch: int) -> list[int]:
    """The numbers of micro-batches that a batch divides into, in ascending order."""
    return [count for count in range(1, batch + 1) if batch % count == 0]


def nearest_count(batch: int, planned: int, samples: int, suits: Callable[[int], bool]) -> int | None:
    """The number of micro-batches for a `batch` of another size than the plan's, which has `planned` micro-batches of
    `samples` samples.

    It is `planned` where that divides the batch. Otherwise it is a divisor that `suits` accepts: the smallest one whose
    micro-batches have at most `samples` samples or, failing that, the largest one. None where it accepts none.
    """
    if batch % planned == 0:
        return planned
    accepted = list(filter(suits, divisors(batch)))
    return next((count for count in accepted if count * samples >= batch), max(accepted, default=None))


def batch_size(shapes: Iterable[Shape]) -> int:
    """The number of samples of inputs of `shapes`: the most frequent first size, except 1, which broadcasts to all
    samples.

    It need not be correct: the rules either show that the loss is a sum over it, or the split is refused.
    """
    sizes = Counter(shape[0] for shape in shapes if shape and shape[0] != 1)
    return sizes.most_common(1)[0][0] if sizes else 1


def batch_dims(shapes: Mapping[str, Shape]) -> dict[str, int | None]:
    """The dim of each input that contains the samples: the first, or the second (positions of several kinds); None for
    an input without samples."""
    batch = batch_size(shapes.values())
    found: dict[str, int | None] = {}
    for name, shape in shapes.items():
        first, second, *_ = (*shape, 1, 1)
        behind = second == batch and first != 1 and len(shape) > 2
        found[name] = 0 if shape and first == batch else 1 if behind else None
    return found


class _WholeBatchError(Exception):
    """The batch cannot be split; the message is the reason."""


@dataclass(frozen=True)
class _Adapted:
    """A choice that fits an op's operands, and which tensors these are then."""

    choice: Choice
    operands: tuple[str, ...]


class _Cutter(Draft):
    """Propagates placements on the axis of micro-batches, and writes the program of one of them."""

    def __init__(self, program: Program, calls: Calls, ways: int, *, couples: bool) -> None:
        dims = batch_dims({item.name: item.type.shape for item in program.inputs})
        self.inputs = {name: R if dim is None else S(dim) for name, dim in dims.items()}
        super().__init__(program, calls.makers, self.inputs, set(calls.flowing), ways)
        self.rules = calls.rules
        self.alike = calls.alike
        self.weighed = calls.weighed
        self.known: dict[Hashable, Choice] = {}
        self.parts: dict[tuple[str, Placement], str] = {}
        self.totals: dict[str, str] = {}
        self.couples = couples
        self.coupled: list[str] = []
        # By results of the ops that number the rows of placeholders.
        self.numbers = {name: item for item in placeholders(program) for op in item.ops for name in op.results}
        self.checks: dict[str, str] = {}
        # Ops of the micro-batch with the rules that follow from discovered ones.
        self.discovered: list[tuple[Op, Rule]] = []

    def run(self) -> MicroBatches:
        program = self.program
        if program.updates:
            raise _WholeBatchError(f"each pass changes the buffer {program.updates[0].buffer}")
        for op in program.ops:
            self._op(op)
        loss = self._loss()
        returned = tuple(rename(value, self._returned) for value in program.outputs)
        outputs = tuple(self._joined(value) for value in returned)
        totals = tuple(Input(name, f"{name} (total)", self.types[name]) for name in self.totals.values())
        types = {name: self.local(name) for name in self.types}
        inputs = tuple(replace(item, type=types[item.name]) for item in program.inputs)
        rules = {**program.rules, **{signature(op, types): rule for op, rule in self.discovered}}
        ops = tuple(chain(*self.ops.values()))
        whole = replace(program, inputs=inputs, ops=ops, outputs=returned, types=types, rules=rules)
        cut = without_unused(replace(whole, inputs=(*inputs, *totals)))
        samples = batch_size(item.type.shape for item in program.inputs) // self.ways
        totals_of = self._totals(whole)
        checks = tuple(self.checks.values())
        return MicroBatches(self.ways, samples, cut, totals_of, self.inputs, outputs, loss, tuple(self.coupled), checks)

    # --- ops ---

    def _op(self, op: Op) -> None:
        if all(self.placements[name] == R and name not in self.apart for name in op.operands):
            if not has_linear_gradients(op) and any(name in self.flowing for name in op.results):
                raise _WholeBatchError(f"{op.key} may change its gradient in a way that micro-batches cannot add up")
            self.ops[op.results[0]].append(op)
            if any(name in self.totaled for name in op.operands):
                self.totaled.update(op.results)
            return
        if any(name in self.numbers for name in (op.results[0], op.operands[-1])):
            self._place(op)
            return
        adapted = self._adapted(op)
        if adapted is None:
            raise _WholeBatchError(self._reason(op))
        self._write(op, adapted, op.results, op.key)
        known = {*self.totals.values(), *self.totaled}
        if any(name in known for name in adapted.operands):
            self.totaled.update(op.results)
        if any(name in self.apart for name in adapted.operands) and P not in adapted.choice.results:
            self.apart.update(op.results)
            if all(name not in self.apart for name in op.operands):
                self.coupled.append(op.key)

    def _place(self, op: Op) -> None:
        """Number the rows of this micro-batch's placeholders, or select them."""
        item = self.numbers.get(op.results[0])
        if item is None:
            if {self.placements[name] for name in op.operands} != {S(0)}:
                raise _WholeBatchError(self._reason(op))
            self.ops[op.results[0]].append(op)
        else:
            samples = batch_size(own.type.shape for own in self.program.inputs)
            if item.flags in self.weighed or not can_number(self, item, samples):
                raise _WholeBatchError(self._reason(op))
            self.ops[op.results[0]].append(numbered(self, item, op))
            if op is item.bounded:
                self.checks[unmatched(self, item, samples)] = (
                    f"{item.count.module or 'the model'} puts {item.rows} rows in as many places (features of images "
                    "in those of their tokens, for instance): in micro-batches, each sample must have "
                    f"{item.rows // samples} of them, and a sample of this batch has not"
                )
        self.placements[op.results[0]] = S(0)

    def _reason(self, op: Op) -> str:
        """Why an op cannot run in one micro-batch."""
        read = {name for other in self.program.ops for name in other.operands}
        if read.isdisjoint(op.results) and not any(self.types[name].shape == () for name in op.results):
            return f"{op.key}, an output, needs the whole batch (outputs='scalars' returns scalars alone)"
        sums = [name for name in op.operands if self.placements[name] == P or name in self.apart]
        if len(sums) < len(op.operands) or self.couples:
            return f"{op.key} needs the whole batch"
        return (
            f"{op.key} needs the whole batch (if it belongs to an auxiliary loss, as the balance of experts, "
            "aux_loss='micro_batch' computes that in each micro-batch and averages it)"
        )

    def _adapted(self, op: Op) -> _Adapted | None:
        """The first choice that the placements of the operands allow, as they are or with a total in place."""
        apart = tuple(name in self.apart for name in op.operands)
        case = self.alike[op.results[0]], tuple(self.placements[name] for name in op.operands), apart
        if case in self.known:
            return _Adapted(self.known[case], op.operands)
        for totals in (False, True):
            for choice in self._choices(op):
                if not self._is_alone(op, choice):
                    continue
                alone = self.couples and totals and all(item == R for item in choice.operands)
                names = [
                    self._as(name, placement, totals=totals, alone=alone)
                    for name, placement in zip(op.operands, choice.operands, strict=True)
                ]
                found = tuple(name for name in names if name is not None)
                if any(item.kind == "S" for item in choice.operands) and any(name in self.apart for name in found):
                    continue
                if found == op.operands and choice.operands == case[1]:
                    self.known[case] = choice
                if len(found) == len(names):
                    return _Adapted(choice, found)
        return None

    def _choices(self, op: Op) -> list[Choice]:
        """The choices for operands that are split or pending sums: propagate the split, pass the sum, or use both as
        they are in the whole batch."""
        rule = self.rules[op.results[0]]
        found: list[Choice | None] = []
        if rule is not None:
            found += [
                self._split(rule, part, self.placements[name])
                for part, name in zip(rule.operands, op.operands, strict=True)
            ]
            found += [passing(rule, index) for index in range(len(rule.linear))]
        found.append(Choice("R", (R,) * len(op.operands), (R,) * len(op.results)))
        return list(dict.fromkeys(choice for choice in found if choice is not None))

    def _split(self, rule: Rule, dims: Dims, placement: Placement) -> Choice | None:
        """The choice that splits an operand or a result with these `dims` in the rule of its op as `placement` does."""
        place = digit(dims, placement, self.ways) if placement.kind == "S" else None
        return None if place is None else split(rule, *place, self.ways)

    def _is_alone(self, op: Op, choice: Choice) -> bool:
        """Whether a micro-batch can run it without the others."""
        rule = self.rules[op.results[0]]
        if rule is None or not choice.factors:
            return True
        factors = [rule.factors[factor] for factor in choice.factors]
        if any(factor.role is Role.INSIDE or factor.ordered for factor in factors) or choice.form not in ("", "mean"):
            return False
        placements = zip((*op.operands, *op.results), (*choice.operands, *choice.results), strict=True)
        return all(fits(self.types[name].shape, (placement,), self.mesh) for name, placement in placements)

    def _as(self, name: str, placement: Placement, *, totals: bool = False, alone: bool = False) -> str | None:
        """The tensor `name` with another placement, if it can be computed without the other micro-batches, or from
        `totals` of them; or what this one `alone` has in its place."""
        own = self.placements[name]
        if own == placement:
            return name
        if own == R and name in self.apart:
            return self.shared(name) if placement == P else None
        if own == R and placement == P:
            return name if self.is_zero(name) else None
        if own == R and placement.kind == "S":
            return self._part(name, placement)
        if own == P and placement == R and totals:
            return self._total(name) or (self.alone(name) if alone else None)
        return None

    def _write(self, op: Op, adapted: _Adapted, results: tuple[str, ...], key: str) -> None:
        """The op on a micro-batch; a mean over samples is a sum that is divided by the number in the whole batch."""
        choice, slots = adapted.choice, iter(adapted.operands)
        for name, own, placement in zip(results, op.results, choice.results, strict=True):
            self.types[name], self.placements[name] = self.types[own], placement
            if own in self.flowing:
                self.flowing.add(name)
        arguments = {item: rename(value, lambda _: Ref(next(slots))) for item, value in op.arguments.items()}
        strategy = Strategy(
            (choice.name,),
            tuple((placement,) for placement in choice.operands),
            tuple((placement,) for placement in choice.results),
        )
        arguments = local_arguments(op, arguments, strategy, (choice,), self.types, self.mesh)
        ops = self.ops[op.results[0]]
        if not choice.form:
            ops.append(replace(op, arguments=arguments, results=results, key=key))
            rule = self.program.rules.get(self.alike[op.results[0]])
            if rule is not None:
                self.discovered.append((ops[-1], on_part(rule, choice.factors, self.ways)))
            return
        (result,) = results
        summed = self.named(f"{result}_summed", self.types[result], self.placements[result])
        target = "aten.sum.default" if op.target == "aten.mean.default" else "aten.sum.dim_IntList"
        ops.append(replace(op, target=target, arguments=arguments, results=(summed,), key=f"{key}.sum"))
        size = prod(self.types[op.operands[0]].shape) // max(prod(self.types[result].shape), 1)
        divided: dict[str, Argument] = {"self": Ref(summed), "other": size}
        ops.append(replace(op, target="aten.div.Scalar", arguments=divided, results=results, key=key))

    # --- parts of what is the same in all micro-batches ---

    def _part(self, name: str, placement: Placement) -> str | None:
        """A micro-batch's part of a tensor that is the same in all of them, if it is the same for all parts."""
        if (name, placement) in self.parts:
            return self.parts[name, placement]
        op = self.makers.get(name)
        if op is None or not fits(self.types[name].shape, (placement,), self.mesh):
            return None
        found = f"{name}_part" if placement.major == 1 else f"{name}_part_{placement.major}"
        if op.kind in _MADE and not op.operands:
            self.named(found, self.types[name], placement)
            arguments = {**op.arguments, "size": local_shape(self.types[name].shape, (placement,), self.mesh)}
            part = replace(op, arguments=arguments, results=(found,), key=f"{op.key}.part")
            self.ops[op.results[0]].append(part)
        else:
            rule = self.rules[op.results[0]]
            choice = (
                self._split(rule, rule.results[0], placement) if rule is not None and len(op.results) == 1 else None
            )
            if choice is None or not self._is_alone(op, choice):
                return None
            names = [self._as(own, wanted) for own, wanted in zip(op.operands, choice.operands, strict=True)]
            operands = tuple(own for own in names if own is not None)
            if len(operands) != len(names):
                return None
            self._write(op, _Adapted(choice, operands), (found,), f"{op.key}.part")
        self.parts[name, placement] = found
        return found

    # --- totals ---

    def _total(self, name: str) -> str | None:
        """The sum over the whole batch, if it follows from the inputs alone."""
        if name in self.weighed or name in self.flowing or self.types[name].size != 1:
            return None
        if name not in self.totals:
            chosen = "total"
            while chosen in self.types:
                chosen = f"total_{len(self.totals)}" if chosen == "total" else f"{chosen}_"
            self.totals[name] = self.named(chosen, self.types[name], R)
        return self.totals[name]

    def _totals(self, whole: Program) -> Program | None:
        """The program of the totals, over those inputs that it reads."""
        if not self.totals and not self.checks:
            return None
        found = totals_program(whole, {**self.totals, **{name: name for name in self.checks}})
        for op in found.ops:
            if draws(op):
                raise _WholeBatchError(f"{op.key} draws random numbers that a sum over the whole batch depends on")
            if any(name in self.totals.values() for name in op.operands):
                raise _WholeBatchError(f"{op.key} makes a sum over the batch from another one")
        return found

    # --- outputs ---

    def _returned(self, name: str) -> Ref:
        """A tensor as it is returned: of one that micro-batches have apart its share of their mean."""
        found = self.shared(name) if name in self.apart else name
        if found is None:
            raise _WholeBatchError(f"{name}, which is returned, is another in each micro-batch and has no mean")
        return Ref(found)

    def _joined(self, value: Argument) -> Placement:
        """The placement of a leaf of the output."""
        return next((self.placements[name] for name in references(value)), R)

    def _loss(self) -> int:
        """The place of the loss among the leaves: what is called so, or else the only scalar."""
        program = self.program
        scalars = [
            index
            for index, value in enumerate(program.outputs)
            if isinstance(value, Ref) and program.types[value.name].shape == () and value.name in self.flowing
        ]
        named = [index for index in scalars if program.output_names[index] == "loss"]
        if not named and len(scalars) != 1:
            raise _WholeBatchError("there is no output called loss")
        (place,) = named or scalars
        value = program.outputs[place]
        assert isinstance(value, Ref)
        if self.placements[value.name] != P:
            raise _WholeBatchError(
                "the loss as a whole couples the samples, not a term of it"
                if value.name in self.apart
                else "the loss does not depend on the batch"
            )
        return place
