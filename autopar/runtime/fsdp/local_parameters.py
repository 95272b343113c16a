"""Plain tensors that generated code reads in place of parameters, and the transfer of their gradients.

Users see `DTensor`s. Reading one costs an operator and a node of autograd, and its gradient goes through `DTensor`'s
dispatch: together about 70 us for each parameter in each step. So generated code reads a leaf of autograd that shares
memory and version counter with the part that this rank stores. A backward pass begins by giving leaves the gradients
that the parameters have, so that autograd adds to these in place, and ends by handing over those that are new:

- `.grad` of a parameter is a `DTensor` before and after a backward pass, and may be assigned or dropped in between;
- an in-place change of a parameter between forward and backward is an error, as it is with any leaf;
- tensor hooks and post-accumulate hooks of a parameter are called for the leaf's gradient, as a `DTensor`;
- `torch.autograd.grad` with respect to parameters, and `backward(inputs=...)`, reach them by an edge of every output;
  parameters of FSDP units, whose gradients are computed for the whole unit, have edges that raise.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, increment_version
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar._torch import (
    DTensorSpec,
    as_distributed,
    has_hooks,
    is_computed_in_backward,
    local_tensor,
    post_accumulate_hooks,
    spec_of,
    tensor_hooks,
)
from autopar.runtime.fsdp import _torch as fsdp
from autopar.runtime.fsdp.gradients import after_tensor_hooks, part_of, refuse_held_back, replaced_since
from autopar.runtime.parameters import places_of
from passes._torch import version_of
from passes.ir.errors import InputError, UnsupportedError

# The parts of the model as generated code sees them: leaves are attributes of theirs.
View = object
# Reduces the gradient of a parameter that is held back. Collective over the mesh.
ReduceHeld = Callable[[nn.Parameter], None]


@dataclass(eq=False)
class _Leaf:
    """A parameter under all its names, and the leaf that is read in its place.

    `table` holds the parameter, under `name`; `readers` the views whose attribute is the leaf. `version` is that of the
    parameter when the leaf last took it over. In a backward pass, `given` is the gradient that it began with, and
    `handles` are the hooks of the leaf.
    """

    path: str
    table: Mapping[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter
    part: Tensor
    tensor: Tensor
    spec: DTensorSpec
    version: int
    readers: "list[tuple[weakref.ref[View], str]]" = field(default_factory=list)
    given: Tensor | None = None
    handles: list[RemovableHandle] = field(default_factory=list)

    def follow(self) -> None:
        """Follow a parameter that replaces another one, and a change of `requires_grad`."""
        found = self.table[self.name]
        assert found is not None
        part = local_tensor(found)
        if part is not self.part:
            self.part, self.tensor, self.spec = part, part.detach(), spec_of(found)
            for reader, attribute in self.readers:
                view = reader()
                if view is not None:
                    vars(view)[attribute] = self.tensor
        if found is not self.parameter:
            self.parameter, self.version = found, version_of(found)
        elif version_of(found) != self.version:
            self.take_version()
        if self.tensor.requires_grad is not found.requires_grad:
            self.tensor.requires_grad_(found.requires_grad)

    def take_version(self) -> None:
        """Bump the version counter for in-place changes of the parameter, which `DTensor` does not report."""
        version = version_of(self.parameter)
        if version != self.version:
            self.version = version
            increment_version(self.tensor)

    def begin_backward(self, reduce_held: ReduceHeld) -> None:
        """Give the leaf the gradient of the parameter, so that autograd adds to it; one that an FSDP unit has held back
        is reduced before."""
        parameter, tensor = self.parameter, self.tensor
        if version_of(parameter) != self.version:
            self.take_version()
        if isinstance(parameter.grad, DTensor) and parameter.grad.placements != self.spec.placements:
            reduce_held(parameter)
        gradient = parameter.grad
        refuse_held_back(self.path, gradient, self.spec)
        tensor.grad = self.given = None if gradient is None else local_tensor(gradient)
        if self.handles:
            self.remove_hooks()
        if not has_hooks(parameter):
            return
        if tensor_hooks(parameter):
            self.handles.append(tensor.register_hook(self._after_hooks))  # type: ignore[no-untyped-call]
        if post_accumulate_hooks(parameter):
            self.handles.append(tensor.register_post_accumulate_grad_hook(partial(self._accumulated, reduce_held)))  # type: ignore[no-untyped-call]

    def end_backward(self, reduce_held: ReduceHeld) -> None:
        """Give the gradient to the parameter.

        The parameter may have another gradient by now: of another program, which reads it in an FSDP unit, in the same
        backward pass.
        """
        if self.handles:
            self.remove_hooks()
        given, self.given = self.given, None
        gradient, self.tensor.grad = self.tensor.grad, None
        earlier = self.parameter.grad
        if gradient is None or (earlier is not None and local_tensor(earlier) is gradient):
            return
        if gradient.requires_grad:
            raise InputError(
                f"the gradient of the parameter {self.path!r} has a graph: second derivatives with respect to "
                "parameters are not supported, call backward without create_graph"
            )
        if earlier is None or (given is not None and gradient is not given):
            self.parameter.grad = as_distributed(gradient, self.spec)
        elif given is None:
            reduce_held(self.parameter)
            part_of(self.parameter.grad).add_(gradient)
        # Otherwise autograd added to `given` in place, which the other gradient has taken over.

    def remove_hooks(self) -> None:
        """Remove the hooks of a backward pass."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _accumulated(self, reduce_held: ReduceHeld, _: Tensor) -> None:
        # The handles stay until the backward pass ends: hooks cannot be removed while they run.
        handles, self.handles = self.handles, []
        self.end_backward(reduce_held)
        self.handles = handles
        for hook in post_accumulate_hooks(self.parameter):
            hook(self.parameter)

    def _after_hooks(self, part: Tensor) -> Tensor:
        """A gradient as the tensor hooks of the parameter return it."""
        return local_tensor(after_tensor_hooks(self.path, self.parameter, as_distributed(part, self.spec)))


class LocalParameters:
    """The leaves of all parameters of a model; `reduce_held` reduces gradients that FSDP units have held back."""

    def __init__(self, root: nn.Module, reduce_held: ReduceHeld) -> None:
        self.reduce_held = reduce_held
        found: dict[int, _Leaf] = {}
        self._paths: dict[str, _Leaf] = {}
        for table, name, path in places_of(root):
            parameter = table[name]
            if parameter is None or not isinstance(parameter.data, DTensor):
                continue
            if id(parameter) not in found:
                part = local_tensor(parameter)
                spec, version = spec_of(parameter), version_of(parameter)
                found[id(parameter)] = _Leaf(path, table, name, parameter, part, part.detach(), spec, version)
            self._paths[path] = found[id(parameter)]
        self._task = fsdp.NO_BACKWARD
        self._begun: dict[_Leaf, None] = {}
        # What programs of this backward pass read in FSDP units.
        self._in_units: set[_Leaf] = set()
        # Its gradient is computed in every backward pass but those that are for certain tensors only.
        self.always = torch.empty((), requires_grad=True)
        self._node_of_always = get_gradient_edge(self.always).node

    def read(self, view: View, names: Iterable[str], in_units: Iterable[str]) -> "ReadParameters":
        """Put leaves in place of the parameters `names` in `view`, the view of the model that a program reads, besides
        those `in_units`."""
        leaves: dict[_Leaf, None] = {}
        wanted = frozenset(names)
        # In the order of the model, which is that of all ranks: what is found first is named in errors.
        for path, leaf in self._paths.items():
            if path not in wanted:
                continue
            leaves[leaf] = None
            *parts, name = path.split(".")
            part = view
            for item in parts:
                part = vars(part)[item]
            leaf.readers = [item for item in leaf.readers if item[0]() is not None]
            leaf.readers.append((weakref.ref(part), name))
            vars(part)[name] = leaf.tensor
        return ReadParameters(self, tuple(leaves), tuple(self._paths[path] for path in sorted(in_units)))

    def begin_backward(self, leaves: Sequence[_Leaf], in_units: Sequence[_Leaf]) -> bool:
        """Begin with the leaves of one program, which reads others `in_units`; returns whether gradients of all leaves
        are computed.

        Called by autograd before it computes any gradient of `leaves`. Raises UnsupportedError for a parameter with
        hooks that another program in this backward pass reads in the other of these ways.
        """
        task = fsdp.current_backward()
        if task != self._task:
            self._task = task
            self._begun, self._in_units = {}, set()
            fsdp.at_end_of_backward(self._end_backward)
        self._in_units.update(in_units)
        for leaf in leaves:
            if leaf not in self._begun:
                self._begun[leaf] = None
                leaf.begin_backward(self.reduce_held)
        # In the order of the model, so that all ranks name the same one.
        for leaf in self._begun if self._in_units else ():
            if leaf in self._in_units and has_hooks(leaf.parameter):
                raise UnsupportedError(
                    f"the parameter {leaf.path!r} has a hook, and one backward pass computes its gradient for calls "
                    "with inputs of different sizes, which would call the hook for each of them: call backward() for "
                    "each loss"
                )
        return is_computed_in_backward(self._node_of_always)

    def _end_backward(self) -> None:
        begun, self._begun, self._in_units, self._task = self._begun, {}, set(), fsdp.NO_BACKWARD
        for leaf in begun:
            leaf.end_backward(self.reduce_held)


@dataclass(frozen=True)
class _Asked:
    """Gradients that a backward pass is for, by the numbers of their parameters; `task` is the pass."""

    task: int
    gradients: dict[int, Tensor]


class _Edges:
    """Edges from the results of a program to the parameters that users see: one node of autograd, which all results
    lead to. Forward passes share it, because a node with many edges takes long to make.

    `trained` are the leaves that require a gradient, `linked` those of them that edges lead to, and `in_units` the
    parameters of FSDP units, by name, that edges lead to.
    """

    def __init__(
        self, trained: Sequence[_Leaf], linked: Sequence[_Leaf], in_units: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        self.trained, self.linked = trained, linked
        # The leaves as this forward pass reads them.
        self._tensors = [leaf.tensor for leaf in trained]
        self._parameters = [*(leaf.parameter for leaf in linked), *(parameter for _, parameter in in_units)]
        self._asked = [_Asked(fsdp.NO_BACKWARD, {})]
        self.hub: Tensor | None = None
        self.nodes: list[Node | None] = []
        self.in_units: list[tuple[str, Node]] = []
        if self._parameters:
            self.hub = _Hub.apply(self._asked, *self._parameters)  # type: ignore[no-untyped-call]
            assert self.hub is not None
            nodes = [node for node, _ in get_gradient_edge(self.hub).node.next_functions]
            self.nodes = nodes[: len(linked)]
            self.in_units = [
                (name, node) for (name, _), node in zip(in_units, nodes[len(linked) :], strict=True) if node is not None
            ]

    def serve(
        self, trained: Sequence[_Leaf], linked: Sequence[_Leaf], in_units: Sequence[tuple[str, nn.Parameter]]
    ) -> bool:
        """Whether these are the edges for `trained`, `linked` and `in_units`."""
        parameters = [*(leaf.parameter for leaf in linked), *(parameter for _, parameter in in_units)]
        same = trained == self.trained and linked == self.linked and len(parameters) == len(self._parameters)
        tensors = (leaf.tensor for leaf in trained)
        return same and all(map(is_, parameters, self._parameters)) and all(map(is_, tensors, self._tensors))

    def check_current(self) -> None:
        """Raise UnsupportedError where a call of the module since has read another parameter."""
        for leaf, tensor in zip(self.trained, self._tensors, strict=True):
            if leaf.tensor is not tensor:
                raise UnsupportedError(replaced_since(leaf.path))

    def give(self, found: Mapping[int, Tensor]) -> None:
        """Let the node give gradients to parameters, by their numbers in `linked`, in the backward pass that runs."""
        task = fsdp.current_backward()
        if self._asked[0].task != task:
            self._asked[0] = _Asked(task, {})
        given = self._asked[0].gradients
        for number, gradient in found.items():
            given[number] = gradient + given[number] if number in given else gradient


class _Hub(torch.autograd.Function):
    """The node that leads to all parameters."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, asked: list[_Asked], *parameters: Tensor) -> Tensor:
        ctx.hub = asked, len(parameters)  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return torch.empty(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: tuple[list[_Asked], int] = ctx.hub  # type: ignore[attr-defined]
        asked, count = saved
        given, asked[0] = asked[0], _Asked(fsdp.NO_BACKWARD, {})
        if given.task != fsdp.current_backward():
            return (None,) * (1 + count)
        return (None, *(given.gradients.get(number) for number in range(count)))


class ReadParameters:
    """The leaves that one program reads; `in_units` are parameters that it reads in FSDP units."""

    def __init__(self, every: LocalParameters, leaves: Sequence[_Leaf], in_units: Sequence[_Leaf]) -> None:
        self._all = every
        self._leaves = leaves
        self._in_units = in_units
        self._edges: _Edges | None = None

    def follow(self) -> None:
        """Take over what users have assigned since the last call."""
        for leaf in self._leaves:
            leaf.follow()

    @contextlib.contextmanager
    def adding_gradients(self) -> Iterator[None]:
        """Context in which gradients of the leaves are accumulated outside of a backward pass of the program."""
        begun = [leaf for leaf in self._leaves if leaf.tensor.requires_grad]
        for leaf in begun:
            leaf.begin_backward(self._all.reduce_held)
        yield
        for leaf in begun:
            leaf.end_backward(self._all.reduce_held)

    def linked(self, results: Sequence[object]) -> tuple[object, ...]:
        """The results of the program, whose backward pass hands gradients over to the parameters."""
        trained = [leaf for leaf in self._leaves if leaf.tensor.requires_grad]
        # An edge would call the hooks of a parameter without a gradient.
        linked = [leaf for leaf in trained if not has_hooks(leaf.parameter)]
        in_units = [
            (leaf.path, parameter)
            for leaf in self._in_units
            if (parameter := leaf.table[leaf.name]) is not None and parameter.requires_grad and not has_hooks(parameter)
        ]
        if self._edges is None or not self._edges.serve(trained, linked, in_units):
            self._edges = _Edges(trained, linked, in_units)
        given = self._all, self._edges, self._in_units
        inputs = (self._all.always, self._edges.hub)
        return tuple(
            _Link.apply(*given, item, *inputs)  # type: ignore[no-untyped-call]
            if isinstance(item, Tensor) and item.requires_grad
            else item
            for item in results
        )


class _Link(torch.autograd.Function):
    """An output with edges to the parameters that users see."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        parameters: LocalParameters,
        edges: _Edges,
        in_units: Sequence[_Leaf],
        output: Tensor,
        *_: Tensor | None,
    ) -> Tensor:
        ctx.link = parameters, edges, in_units, output  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        parameters, edges, in_units, output = ctx.link  # type: ignore[attr-defined]
        edges.check_current()
        if gradient is not None and not parameters.begin_backward(edges.trained, in_units):
            edges.give(_asked_for(edges, output, gradient))
        for leaf in edges.linked:
            if has_hooks(leaf.parameter):
                raise InputError(
                    f"a hook of the parameter {leaf.path!r} was registered between forward and backward: register it "
                    "before the forward pass"
                )
        return (None, None, None, gradient, None, None)


def _asked_for(edges: _Edges, output: Tensor, gradient: Tensor) -> dict[int, Tensor]:
    """Gradients of those parameters that a backward pass is for, by a backward pass of their leaves."""
    for name, node in edges.in_units:
        if is_computed_in_backward(node):
            raise InputError(
                f"a gradient is asked for of the parameter {name!r}, which lies in an FSDP unit, whose gradients are "
                "reduced together: call backward() without inputs= in place of it or of torch.autograd.grad, and read "
                ".grad"
            )
    leaves = edges.linked
    asked = [number for number, node in enumerate(edges.nodes) if node is not None and is_computed_in_backward(node)]
    if not asked:
        return {}
    if torch.is_grad_enabled():
        raise InputError("second derivatives with respect to parameters are not supported: leave out create_graph")
    tensors = [leaves[number].tensor for number in asked]
    results = torch.autograd.grad(output, tensors, gradient, retain_graph=True, allow_unused=True)
    return {
        number: as_distributed(result, leaves[number].spec)
        for number, result in zip(asked, results, strict=True)
        if result is not None
    }
