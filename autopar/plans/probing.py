"""Memory behaviour of the statements of generated code, found by running each of them on fake tensors.

A statement runs alone: its operands come from one autograd node and its results go to another, so that it is seen when
gradients come, are no longer read, and are there. What autograd keeps is told by hooks, and every storage by when it is
made and dies. Nothing is computed and nothing is sent. Equal statements are run once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from autopar import runtime
from autopar._torch import collectives
from autopar.plans.cuda_attention import CudaAttention
from autopar.runtime import Axis
from autopar.runtime.generated.chunked_attention import largest_chunk
from autopar.runtime.generated.linear_loss import first_chunks
from autopar.runtime.state import spanning
from passes._torch import FakeTensorMode, OpOverload, TorchDispatchMode, pytree, storage_id, storage_number
from passes.codegen.expressions import Scope, computed
from passes.cost.liveness import (
    BackwardProfile,
    Event,
    EventKind,
    Form,
    ForwardProfile,
    OperandGradient,
    ResultStorage,
    StorageRef,
    Task,
)
from passes.cost.liveness.graph import assumed_backward, assumed_forward, compacted
from passes.ir.layout import local_shape
from passes.ir.lowered import Compute
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.ir.redistribution import RedistributionStep
from passes.scans import SCANS

T = TypeVar("T")

# Operators that do the same to memory on every device. They run on meta, which is quick; of the others torch chooses
# the kernel by the device, and they run on fake tensors.
_SAME_EVERYWHERE = frozenset(
    {
        "__and__", "__or__", "abs", "add", "addmm", "all", "any", "arange", "argmax", "baddbmm", "bitwise_and",
        "bitwise_not", "bitwise_or", "bmm", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clone",
        "contiguous", "copy", "cos", "cross_entropy_loss", "cumsum", "div", "einsum", "elu", "embedding", "eq",
        "erf", "exp", "expand", "expm1", "floor", "floor_divide", "full", "full_like", "ge", "gelu", "gt",
        "index_select", "isnan", "le", "leaky_relu", "linear", "log", "log1p", "log_softmax", "logical_and",
        "logical_not", "logical_or", "logsumexp", "lt", "masked_fill", "matmul", "max", "maximum", "mean",
        "min", "minimum", "mm", "mse_loss", "mul", "ne", "neg", "ones", "ones_like", "pad", "permute", "pow",
        "reciprocal", "relu", "repeat", "reshape", "round", "rsqrt", "rsub", "scalar_tensor", "select",
        "sigmoid", "sign", "silu", "sin", "slice", "softmax", "softplus", "split", "sqrt", "square", "squeeze",
        "stack", "sub", "sum", "tanh", "to", "transpose", "tril", "triu", "unbind", "unflatten", "unsqueeze",
        "view", "view_as_complex", "view_as_real", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
# Operators that do on CUDA what they do on meta: these keep statistics in float32, and on the CPU in the input's dtype.
_AS_ON_CUDA = frozenset({"layer_norm", "native_layer_norm"})
_SAME_FORMS = frozenset({"", "mean", "vocabulary_embedding", "vocabulary_cross_entropy", "softmax", "log_softmax"})


class FakeProber:
    """Looks into statements as a kind of `device` ("cpu" or "cuda") runs them, on the last rank of `mesh`, which has
    most to do where ranks differ. With a `unit`, events are put into fewer, for an allocator of its multiples."""

    def __init__(self, mesh: Mesh, device: str = "cpu", unit: int | None = None) -> None:
        self._mesh, self._unit = mesh, unit
        self._on_meta = _SAME_EVERYWHERE | _AS_ON_CUDA if device == "cuda" else _SAME_EVERYWHERE
        self._axes = tuple(f"axis_{index}" for index in range(len(mesh.sizes)))
        axes = [Axis(name, size, size - 1, "0") for name, size in zip(self._axes, mesh.sizes, strict=True)]
        self._names: dict[str, object] = {
            "torch": torch,
            "F": functional,
            **vars(runtime),
            "chunked_attention": largest_chunk,
            "linear_cross_entropy": first_chunks,
            **dict(zip(self._axes, spanning(axes, mesh.spans, lambda _: "0"), strict=True)),
        }
        self._fake = FakeTensorMode()
        self._kernels = CudaAttention() if device == "cuda" else nullcontext()
        self._by_device: set[str] = set()
        self._closed: set[str] = set()
        self._results: dict[str, tuple[Form, ...]] = {}
        self._forward: dict[Task, ForwardProfile] = {}
        self._assumed: set[Task] = set()
        self._backward: dict[tuple[Task, tuple[Form | None, ...]], BackwardProfile] = {}

    def compute(self, statement: Compute, types: Mapping[str, TensorType], copied: frozenset[str]) -> str:
        """The expression of an op; operands in `copied` are read as copies of what they are called."""
        operands = {name: f"x{index}" for index, name in enumerate(dict.fromkeys(statement.op.operands))}
        texts = {name: f"{text}.clone()" if name in copied else text for name, text in operands.items()}
        # Of a weight gradient that is computed apart, the step knows what waits for it.
        text = computed(_Text(types, texts, self._span), replace(statement, deferred=()))
        if statement.op.kind not in self._on_meta or statement.body not in _SAME_FORMS:
            self._by_device.add(text)
        self._results[text] = tuple(
            Form.contiguous(local_shape(types[name].shape, layout, self._mesh), types[name].dtype)
            for name, layout in zip(statement.op.results, statement.strategy.results, strict=True)
        )
        return text

    def _span(self, number: int) -> str:
        """The expression of the axes that a collective runs over."""
        return " * ".join(self._axes[axis] for axis in self._mesh.spans[number])

    def change(self, step: RedistributionStep, dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> str:
        """The expression of a step of a redistribution; `dtypes` as those of a `Change`."""
        extra = "".join(
            f", {name}={dtype}"
            for name, dtype in zip(("dtype", "grad_dtype"), dtypes, strict=True)
            if dtype is not None
        )
        return f"{step.collective}(x0, {self._span(step.span)}, src={step.source}, dst={step.target}{extra})"

    def forward(self, task: Task) -> ForwardProfile:
        """The memory events of a task's forward pass."""
        if task not in self._forward:
            found = self._look(task, lambda run: run.forward())
            if found is None:
                # What runs backward must be of the same kind: it speaks of what forward keeps.
                self._assumed.add(task)
                found = assumed_forward(task, self._results[task.text])
            self._forward[task] = replace(found, events=self._compacted(found.events))
        return self._forward[task]

    def backward(self, task: Task, gradients: tuple[Form | None, ...]) -> BackwardProfile:
        """The memory events of a task's backward pass, given the forms of the gradients of its results."""
        if (task, gradients) not in self._backward:
            forward = self.forward(task)
            found = None if task in self._assumed else self._look(task, lambda run: run.backward(gradients))
            found = found or assumed_backward(task, gradients, forward)
            self._backward[task, gradients] = replace(found, events=self._compacted(found.events))
        return self._backward[task, gradients]

    def _compacted(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        return events if self._unit is None else compacted(events, self._unit)

    def _look(self, task: Task, look: Callable[["_Run"], T]) -> T | None:
        """The result of `look` on a run of a task; None where the task cannot run without values."""
        if task.text in self._closed:
            return None
        try:
            with self._device(task) as device:
                return look(_Run(task, self._names, device))
        except RuntimeError:
            if task.text in self._by_device:
                self._closed.add(task.text)
                return None
            # Not every operator runs on meta.
            self._by_device.add(task.text)
            return self._look(task, look)

    @contextmanager
    def _device(self, task: Task) -> Iterator[torch.device]:
        """The device that a task runs on, without values."""
        if task.text not in self._by_device:
            yield torch.device("meta")
            return
        with self._fake, self._kernels:
            yield torch.device("cpu")


@dataclass(frozen=True)
class _Text(Scope):
    """The scope of a statement that stands alone: the expressions of its operands, and the variables of axes."""

    types: Mapping[str, TensorType]
    texts: Mapping[str, str]
    axes: Callable[[int], str]

    def span(self, number: int) -> str:
        """The expression of the axes that a collective runs over."""
        return self.axes(number)

    def read(self, value: str) -> str:
        """The expression that reads an operand."""
        return self.texts[value]


class _Run:
    """One run of a statement. `places` knows the storages that were seen, by their address."""

    def __init__(self, task: Task, names: Mapping[str, object], device: torch.device) -> None:
        self.task = task
        self.names = {**names, "self": SimpleNamespace(device=device)}
        self.device = device
        self.events: list[Event] = []
        self.places: dict[int, StorageRef] = {}
        self.watched: dict[int, ref[torch.UntypedStorage]] = {}
        self.allocated = 0
        self.expected: StorageRef | None = None
        self.reading: int | None = None
        self.saved: list[StorageRef | None] = []
        self.given: dict[int, OperandGradient] = {}

    def forward(self) -> ForwardProfile:
        """The events of the forward pass."""
        operands = self.operands()
        with _Watch(self):
            results = self.results(operands)
            events = tuple(self.events)
            made = tuple(
                ResultStorage(self.places[storage_id(result)], _form(result), result.requires_grad)
                for result in results
            )
            return ForwardProfile(events, made, tuple(self.saved), self.attached(results))

    def backward(self, gradients: tuple[Form | None, ...]) -> BackwardProfile:
        """The events of the backward pass."""
        operands = self.operands()
        with _Watch(self):
            results = self.results(operands)
            roots = [
                _Source.apply(result, index, wanted, self)  # type: ignore[no-untyped-call]
                for index, (result, wanted) in enumerate(zip(results, gradients, strict=True))
                if wanted is not None
            ]
            ones = [torch.ones_like(root) for root in roots]
            self.events.clear()
            torch.autograd.backward(roots, ones)
            return BackwardProfile(tuple(self.events), self.given)

    def attached(self, results: Sequence[Tensor]) -> tuple[StorageRef, ...]:
        """Storages saved as attributes of Python autograd functions, which saved-tensor hooks do not see."""
        found: dict[StorageRef, None] = {}
        seen: set[object] = set()
        waiting: list[object] = [result.grad_fn for result in results]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [after for after, _ in getattr(node, "next_functions", ())]
            if isinstance(node, torch.autograd.function.BackwardCFunction) and not isinstance(node, _Sink):
                held = [storage_id(value) for value in vars(node).values() if isinstance(value, Tensor)]
                found.update({self.places[address]: None for address in held if address in self.places})
        return tuple(found)

    def operands(self) -> dict[str, Tensor]:
        """New tensors of the operands' forms."""
        made = {}
        for index, (wanted, flows) in enumerate(zip(self.task.operands, self.task.flows, strict=True)):
            tensor = _new(wanted, self.device)
            self.places[storage_id(tensor)] = StorageRef("operand", index)
            made[f"x{index}"] = _Sink.apply(tensor.requires_grad_(), index, self) if flows else tensor  # type: ignore[no-untyped-call]
        return made

    def results(self, operands: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the statement."""
        grad: AbstractContextManager[object] = nullcontext() if any(self.task.flows) else torch.no_grad()
        with torch.autograd.graph.saved_tensors_hooks(self.keep, _Saved.read), grad:
            value = eval(self.task.text, {**self.names, **operands})
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)

    def keep(self, tensor: Tensor) -> "_Saved":
        """Pack hook: the object that autograd saves instead of a tensor."""
        self.saved.append(self.places.get(storage_id(tensor)))
        self.happen("keep", len(self.saved) - 1)
        return _Saved(tensor.detach(), len(self.saved) - 1, self)

    def happen(self, what: EventKind, index: int, size: int = 0) -> None:
        """Record an event."""
        self.events.append(Event(what, index, size))

    def see(self, tensor: Tensor) -> None:
        """Record the storage of a tensor, and when it is freed."""
        storage = tensor.untyped_storage()
        if storage_number(storage) in self.places:
            return
        if self.reading is not None:
            # What is read lies where that does which autograd keeps, and dies when whoever reads lets go.
            self.watch(storage, self.saved[self.reading], "done", self.reading)
            return
        if self.expected is not None:
            place, self.expected = self.expected, None
        else:
            place = StorageRef("own", self.allocated)
            self.allocated += 1
            self.happen("allocate", place.index, storage.nbytes())
        self.watch(storage, place, "free" if place.origin == "own" else "taken", place.index)

    def watch(self, storage: torch.UntypedStorage, place: StorageRef | None, last: EventKind, index: int) -> None:
        """Know a storage until it dies, which the event `last` of `index` records."""
        address = storage_number(storage)
        if place is not None:
            self.places[address] = place

        def end(_: object) -> None:
            self.places.pop(address, None)
            self.watched.pop(address)
            self.happen(last, index)

        self.watched[address] = ref(storage, end)


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd saves."""

    tensor: Tensor
    index: int
    run: _Run

    def read(self) -> Tensor:
        """Unpack hook: return a copy of the tensor, so that its release by the backward pass is recorded."""
        self.run.happen("use", self.index)
        self.run.reading = self.index
        given = _new(_form(self.tensor), self.tensor.device)
        self.run.reading = None
        return given

    def __del__(self) -> None:
        self.run.happen("release", self.index)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor that an operator makes."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator and record the storages of its results; of a scan, all that its function makes."""
        if func is collectives.wait_tensor.default:
            # It returns what it is given; without values it would make a new tensor.
            return args[0]
        if func in SCANS:
            with self:
                return SCANS[func](*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor):
                self.run.see(leaf)
        return results


class _Sink(torch.autograd.Function):
    """An operand: takes its gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, index: int, run: _Run) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.about = (index, run)  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor | None) -> tuple[None, None, None]:
        index, run = ctx.about  # type: ignore[attr-defined]
        if gradient is not None:
            run.given[index] = OperandGradient(run.places[storage_id(gradient)], _form(gradient))
            run.happen("give", index)
        return None, None, None


class _Source(torch.autograd.Function):
    """A result: gives its gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, index: int, wanted: Form, run: _Run
    ) -> Tensor:
        ctx.about = (index, wanted, run)  # type: ignore[attr-defined]
        return tensor.new_empty(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        index, wanted, run = ctx.about  # type: ignore[attr-defined]
        run.expected = StorageRef("gradient", index)
        return _new(wanted, run.device), None, None, None


def _new(wanted: Form, device: torch.device) -> Tensor:
    return torch.empty_strided(wanted.shape, wanted.stride, dtype=wanted.dtype, device=device)


def _form(tensor: Tensor) -> Form:
    """The form of a tensor; how far apart the elements of a dim of size 1 are says nothing."""
    plain = Form.contiguous(tuple(tensor.shape), tensor.dtype)
    steps = zip(plain.shape, plain.stride, tensor.stride(), strict=True)
    return Form(plain.shape, tuple(inner if size == 1 else step for size, inner, step in steps), plain.dtype)
