"""Functionalization: every in-place op returns a new tensor, and views of the old one are regenerated from it.

A change of a view is a change of what it views: the new values are put back into the tensor below it, up to the
tensor that owns the memory, and all other views of that tensor are taken again. Buffers that change are the program's
updates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from passes._torch import schema_of
from passes.ir.arguments import Argument, Ref, find_overload, integer, references
from passes.ir.errors import CaptureError
from passes.ir.program import REPEATABLE, Op, Program, TensorType, Update, differentiable
from passes.normalize.rewriter import Rewriter
from passes.rules.parts import dim_argument, dims_argument

# In-place ops whose other form is not called by their name without the underscore.
_OTHER_NAMES = {"normal_": "normal_functional", "__iand__": "__and__", "__ior__": "__or__", "__ixor__": "__xor__"}
_OTHER_OVERLOADS = {("bernoulli_", "float"): "p"}


def functional(program: Program) -> Program:
    """Replace every in-place op by one that gives a new tensor.

    Raises CaptureError for a change of an input that would not be the same the next time, of a parameter, and for one
    that cannot be followed to all views.
    """
    return _Functional(program).run()


@dataclass(frozen=True)
class _View:
    """A tensor that shares memory with `base`: result `index` of `op`."""

    op: Op
    index: int
    base: str


@dataclass
class _Functional:
    program: Program
    views: dict[str, _View] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)

    def run(self) -> Program:
        """Rewrite the whole program."""
        program = self.program
        self.rewriter = Rewriter(program)
        self.flowing = differentiable(program)
        self.buffers = {buffer.name for buffer in program.buffers}
        self.given = {item.name: "input" for item in program.inputs}
        self.given.update({item.name: "parameter" for item in program.parameters})
        self.last_use = {name: position for position, op in enumerate(program.ops) for name in op.operands}
        returned = (name for value in program.outputs for name in references(value))
        self.last_use.update(dict.fromkeys(returned, len(program.ops)))
        for position, op in enumerate(program.ops):
            self.op(position, op)
        return self.rewriter.finish(tuple(Update(buffer, value) for buffer, value in self.changed.items()))

    def op(self, position: int, original: Op) -> None:
        """Rewrite one op."""
        op = self.rewriter.current(original)
        if original.kind.startswith(("_assert", "sym_constrain")):
            return
        if op.kind == "batch_norm" and op.arguments["training"] and op.arguments["running_mean"] is not None:
            self.batch_norm(op, original)
            return
        schema = schema_of(op.overload).arguments
        written = [item.name for item in schema if item.alias_info is not None and item.alias_info.is_write]
        if len(written) > 1:
            raise CaptureError(f"{op.kind} at {op.line} writes into several tensors that are given: leave out `out=`")
        if written:
            target = next(references(original.arguments[written[0]]))
            self.change(position, op, original, self.same.get(target, target))
            return
        self.rewriter.ops.append(op)
        for item in schema:
            if item.alias_info is not None:
                for name in references(original.arguments[item.name]):
                    base = self.same.get(name, name)
                    for index, result in enumerate(original.results):
                        if result not in self.program.copied:
                            self.views[result] = _View(original, index, base)

    def root(self, name: str) -> str:
        """The tensor that owns the memory."""
        while name in self.views:
            name = self.views[name].base
        return name

    def change(self, position: int, op: Op, original: Op, target: str) -> None:
        """Write an in-place op on `target` as one that gives a new tensor."""
        root = self.root(target)
        if root in self.given:
            kind = self.given[root]
            if kind == "parameter" or op.kind not in REPEATABLE:
                raise CaptureError(f"{op.kind} at {op.line} changes the {kind} {root!r} in place: work on a copy of it")
        # The op's result is the target itself, under one more name.
        self.same.update(dict.fromkeys(original.results, target))
        value = _out_of_place(self.rewriter, op)
        self.replace(target, value)
        path = [target]
        above = [name for name in self.sharing(root) if self.read_later(name, position)]
        if root in self.buffers or any(name != target for name in above):
            while path[-1] in self.views:
                view = self.views[path[-1]]
                value = self.put_back(view, value, op)
                self.replace(view.base, value)
                path.append(view.base)
            for name in above:
                if name not in path:
                    self.take_again(name)
        if root in self.buffers:
            self.changed[root] = value.name

    def sharing(self, root: str) -> list[str]:
        """All names of tensors in the memory of `root`, in the order in which they were made."""
        return [root, *(name for name in self.views if self.root(name) == root)]

    def read_later(self, name: str, position: int) -> bool:
        """Whether `name`, or a view of it that stands already, is read after `position`."""
        names = [name, *(other for other, owner in self.same.items() if owner == name)]
        if any(self.last_use.get(other, -1) > position for other in names):
            return True
        return any(view.base == name and self.read_later(other, position) for other, view in self.views.items())

    def replace(self, name: str, value: Ref) -> None:
        """Let `name`, and what it is called besides, be `value` from now on."""
        for other in (name, *(alias for alias, owner in self.same.items() if owner == name)):
            self.rewriter.replaced[other] = value

    def put_back(self, view: _View, value: Ref, op: Op) -> Ref:
        """The base of a view, with the view's elements replaced by `value`."""
        writer = _PUT_BACK.get(view.op.kind)
        if writer is None or (view.op.kind == "detach" and view.base in self.flowing):
            raise CaptureError(
                f"{op.kind} at {op.line} changes in place a tensor that {view.op.kind} at {view.op.line} made of one "
                "that is used elsewhere: write it without in-place"
            )
        base = self.rewriter.follow(Ref(view.base))
        assert isinstance(base, Ref)
        return writer(self.rewriter, view.op, view.index, base, value)

    def take_again(self, name: str) -> None:
        """Take a view anew, of what its base is now."""
        view = self.views[name]
        names = tuple(f"{result}_a{self.rewriter.count}" for result in view.op.results)
        self.rewriter.count += 1
        for new, result in zip(names, view.op.results, strict=True):
            self.rewriter.types[new] = self.rewriter.types[result]
        self.rewriter.ops.append(replace(self.rewriter.current(view.op), results=names))
        self.replace(name, Ref(names[view.index]))

    def batch_norm(self, op: Op, original: Op) -> None:
        """Batch statistics, and the running ones as updates of their buffers."""
        arguments, rewriter = op.arguments, self.rewriter
        channels = rewriter.type(arguments["running_mean"])
        suffixes = ("", "_mean", "_invstd", "_running_mean", "_running_var")
        results = tuple(f"{op.results[0]}{suffix}" for suffix in suffixes)
        for name in results[1:]:
            rewriter.types[name] = channels
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        target = "aten._native_batch_norm_legit_functional.default"
        rewriter.ops.append(
            replace(op, target=target, arguments={name: arguments[name] for name in names}, results=results)
        )
        for position, statistic in enumerate(("running_mean", "running_var"), start=3):
            buffer = next(references(original.arguments[statistic]))
            self.changed[buffer] = results[position]
            rewriter.replaced[buffer] = Ref(results[position])


def _out_of_place(rewriter: Rewriter, op: Op) -> Ref:
    """Write what an in-place op computes as a new tensor."""
    type = rewriter.types[op.results[0]]
    if op.kind == "copy_":
        source = op.arguments["src"]
        given = rewriter.type(source)
        if given.dtype != type.dtype:
            given = TensorType(given.shape, type.dtype)
            source = rewriter.write(op, "aten.to.dtype", given, source, type.dtype)
        if given.shape != type.shape:
            source = rewriter.write(op, "aten.expand.default", type, source, type.shape)
        assert isinstance(source, Ref)
        return source
    namespace, name, overload = op.target.split(".")
    if any(item.kwarg_only and item.alias_info is not None for item in schema_of(op.overload).arguments):
        return _into_new(rewriter, op, type)
    other = _OTHER_NAMES.get(name, name.rstrip("_"))
    target = f"{namespace}.{other}.{_OTHER_OVERLOADS.get((name, overload), overload)}"
    try:
        schema = schema_of(find_overload(target)).arguments
    except AttributeError:
        raise CaptureError(f"{op.kind} at {op.line} works in place and has no other form: write it without") from None
    first, *rest = op.arguments.items()
    return rewriter.write(op, target, type, **{schema[0].name: first[1]}, **dict(rest))


# The options of ops that make a tensor from numbers.
_OF_NEW = frozenset({"dtype", "layout", "device", "pin_memory"})


def _into_new(rewriter: Rewriter, op: Op, type: TensorType) -> Ref:
    """Write what an op with `out=` computes as a new tensor, of the dtype of the given one."""
    own = schema_of(op.overload).arguments
    given = {item.name: str(item.type) for item in own if item.alias_info is None or not item.alias_info.is_write}
    namespace, name, _ = op.target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in packet.overloads():
        target = f"{namespace}.{name}.{overload}"
        schema = schema_of(find_overload(target)).arguments
        others = {item.name: str(item.type) for item in schema if item.name in given or item.name not in _OF_NEW}
        if others == given and not any(item.alias_info is not None for item in schema):
            # One that makes a tensor from numbers is told its dtype and device, which `out` has otherwise.
            arguments = {name: op.arguments[name] for name in given}
            if len(schema) > len(others):
                arguments |= {"dtype": type.dtype, "device": torch.device("cpu")}
            return rewriter.write(op, target, type, **arguments)
    raise CaptureError(
        f"{op.kind} at {op.line} writes into memory that is given, and has no other form: leave out `out=`"
    )


# --- from a view back to what it views -------------------------------------------------------------------------------

_Writer = Callable[[Rewriter, Op, int, Ref, Ref], Ref]


def _reshaped(rewriter: Rewriter, view: Op, index: int, base: Ref, value: Ref) -> Ref:
    type = rewriter.type(base)
    return rewriter.write(view, "aten.reshape.default", type, value, type.shape)


def _scattered(target: str, *names: str) -> _Writer:
    """The writer for views whose inverse is `target`, which takes the arguments `names` of the view."""

    def write(rewriter: Rewriter, view: Op, index: int, base: Ref, value: Ref) -> Ref:
        options = {name: view.arguments[name] for name in names}
        return rewriter.write(view, target, rewriter.type(base), self=base, src=value, **options)

    return write


def _narrowed(rewriter: Rewriter, view: Op, index: int, base: Ref, value: Ref) -> Ref:
    type, dim, length = rewriter.type(base), integer(view.arguments["dim"]), integer(view.arguments["length"])
    start = dim_argument(view.arguments["start"], type.shape[dim])
    return rewriter.write(view, "aten.slice_scatter.default", type, base, value, dim, start, start + length)


def _unbound(rewriter: Rewriter, view: Op, index: int, base: Ref, value: Ref) -> Ref:
    dim = view.arguments["dim"]
    return rewriter.write(view, "aten.select_scatter.default", rewriter.type(base), base, value, dim, index)


def _divided(rewriter: Rewriter, view: Op, index: int, base: Ref, value: Ref) -> Ref:
    """Part `index` of split, chunk, split_with_sizes or tensor_split."""
    type, dim = rewriter.type(base), integer(view.arguments["dim"])
    sizes = [rewriter.types[name].shape[dim] for name in view.results]
    start = sum(sizes[:index])
    return rewriter.write(view, "aten.slice_scatter.default", type, base, value, dim, start, start + sizes[index])


def _moved(rewriter: Rewriter, view: Op, index: int, base: Ref, value: Ref) -> Ref:
    """A view that moved dims: move them back."""
    type = rewriter.type(base)
    order = moved_dims(view, len(type.shape))
    back = tuple(order.index(dim) for dim in range(len(order)))
    return rewriter.write(view, "aten.permute.default", type, value, back)


def moved_dims(op: Op, rank: int) -> list[int]:
    """For an op that moves dims: which dim of its operand stands in each place of its result."""
    return _ORDERS[op.kind](op.arguments, rank)


def _swap(first: str, second: str) -> Callable[[Mapping[str, Argument], int], list[int]]:
    def order(arguments: Mapping[str, Argument], rank: int) -> list[int]:
        order = list(range(rank))
        one, two = (dim_argument(arguments[name], rank) for name in (first, second))
        order[one], order[two] = order[two], order[one]
        return order

    return order


def _set_down(arguments: Mapping[str, Argument], rank: int) -> list[int]:
    """movedim: dims `source` stand at `destination`, the others keep their order in between."""
    destination, source = (dims_argument(arguments[name], rank) for name in ("destination", "source"))
    placed = dict(zip(destination, source, strict=True))
    rest = iter(dim for dim in range(rank) if dim not in placed.values())
    return [placed[dim] if dim in placed else next(rest) for dim in range(rank)]


_ORDERS: dict[str, Callable[[Mapping[str, Argument], int], list[int]]] = {
    "transpose": _swap("dim0", "dim1"),
    "swapaxes": _swap("axis0", "axis1"),
    "swapdims": _swap("dim0", "dim1"),
    "permute": lambda arguments, rank: list(dims_argument(arguments["dims"], rank)),
    "movedim": _set_down,
    "moveaxis": _set_down,
    **dict.fromkeys(("t", "numpy_T"), lambda arguments, rank: list(reversed(range(rank)))),
    "mT": lambda arguments, rank: [*range(rank - 2), rank - 1, rank - 2],
}

_PUT_BACK: dict[str, _Writer] = {
    **dict.fromkeys(
        (
            *("view", "unflatten", "squeeze", "unsqueeze", "view_as", "alias", "lift_fresh", "ravel", "reshape"),
            *("contiguous", "to", "flatten", "reshape_as", "type_as", "_reshape_alias", "detach"),
        ),
        _reshaped,
    ),
    **dict.fromkeys(_ORDERS, _moved),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), _divided),
    "slice": _scattered("aten.slice_scatter.default", "dim", "start", "end", "step"),
    "narrow": _narrowed,
    "select": _scattered("aten.select_scatter.default", "dim", "index"),
    "unbind": _unbound,
    "diagonal": _scattered("aten.diagonal_scatter.default", "offset", "dim1", "dim2"),
}
