"""Saved tensors of autograd: gathered tensors are saved as their shards and regathered, cheap results are recomputed.

Generated code calls collectives with `keep=False`, and ops through `recomputed`, where the plan says so. While
`saving()` is entered, such results are recorded. When autograd saves one (or a view of one), its sources are saved
instead, or the sources of these, and the backward pass recomputes the result.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from passes._torch import storage_id, version_of

CHANGED = (
    "a tensor that the backward pass needs was changed in place after the forward pass (a parameter, by the "
    "optimizer?): run backward before changing it"
)


@dataclass
class _Recomputable:
    """A result that the backward pass recomputes by `run` from `sources`.

    `uses` counts how often autograd saved it or a view of it; `value` is the recomputed result until its last use.
    """

    storage: StorageWeakRef
    sources: "tuple[_Packed, ...]"
    run: Callable[..., Tensor]
    uses: int = 0
    value: Tensor | None = field(default=None, repr=False)

    def use(self) -> None:
        """Count that autograd saves the result, or a view of it, by its sources."""
        if not self.uses:
            for source in self.sources:
                if isinstance(source, _RecomputedView):
                    source.result.use()
        self.uses += 1

    def fetch(self) -> Tensor:
        """Return the recomputed result; it is dropped after its last use."""
        result = self.value
        if result is None:
            with torch.no_grad():
                result = self.run(*map(_unpack, self.sources))
        self.uses -= 1
        self.value = result if self.uses > 0 else None
        return result


@dataclass(frozen=True)
class _Saved:
    """A tensor that is saved as it is, and its version at that time."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _RecomputedView:
    """A view of a recomputed result, possibly a real, imaginary, conjugate or negative view."""

    result: _Recomputable
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    is_conj: bool
    is_neg: bool

    def fetch(self) -> Tensor:
        """Return the same view of the recomputed result."""
        found = self.result.fetch()
        conj, neg = found.is_conj(), found.is_neg()
        if found.dtype == self.dtype:
            view = found.as_strided(self.shape, self.stride, self.offset)
        else:
            conj = neg = False
            view = torch.empty(0, dtype=self.dtype, device=found.device)
            view.set_(found.untyped_storage(), self.offset, self.shape, self.stride)
        view = view.conj() if conj != self.is_conj else view
        return view.neg() if neg != self.is_neg else view


_Packed = _Saved | _RecomputedView


@dataclass
class _Unresolved:
    """A tensor that autograd saves while an op runs, before it is known whether it is the op's result."""

    packed: _Packed


# The tensors that autograd has saved for the op that runs.
_running: ContextVar[list[_Unresolved] | None] = ContextVar("running", default=None)

# Recomputable results of the forward pass that runs, by storage.
_recomputable: ContextVar[dict[int, _Recomputable] | None] = ContextVar("recomputable", default=None)


def note_recomputable(result: Tensor, run: Callable[..., Tensor], *sources: Tensor) -> None:
    """Record that `result` is `run(*sources)` and need not be saved for backward.

    Does nothing outside `saving()`, nor where `result` is one of `sources` or a view of it.
    """
    known = _recomputable.get()
    if known is None or not torch.is_grad_enabled():
        return
    place = storage_id(result)
    if any(storage_id(source) == place for source in sources):
        return
    # Freed results will not be saved; their entries would keep their sources alive.
    for gone in [key for key, item in known.items() if item.storage.expired()]:  # type: ignore[no-untyped-call]
        del known[gone]
    storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
    known[storage.cdata] = _Recomputable(storage, tuple(map(_source, sources)), run)


def recomputed(run: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return `run(*operands)`; backward recomputes it from the operands, or from the sources that these come from.

    In code compiled by torch, its own partitioner chooses the saved tensors and recomputes cheap ops.
    """
    if torch.compiler.is_compiling():
        return run(*operands)
    saved: list[_Unresolved] = []
    token = _running.set(saved)
    try:
        result = run(*operands)
    finally:
        _running.reset(token)
    if not torch.is_autocast_enabled(result.device.type):
        note_recomputable(result, run, *operands)
        # Autograd saved some tensors before the result was recorded.
        for item in saved:
            if isinstance(item.packed, _Saved):
                item.packed = _pack(item.packed.tensor)
    return result


def _source(tensor: Tensor) -> _Packed:
    known = _recomputable.get()
    result = known.get(storage_id(tensor)) if known else None
    if result is None:
        return _Saved(tensor.detach(), version_of(tensor))
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    return _RecomputedView(result, tensor.dtype, shape, stride, offset, tensor.is_conj(), tensor.is_neg())


def _pack(tensor: Tensor) -> _Packed:
    packed = _source(tensor)
    if isinstance(packed, _RecomputedView):
        packed.result.use()
    return packed


def _pack_unresolved(tensor: Tensor) -> "_Packed | _Unresolved":
    """Pack a tensor that autograd saves while an op runs whose result will be recorded: it may be that result."""
    packed, running = _pack(tensor), _running.get()
    if running is None or isinstance(packed, _RecomputedView):
        return packed
    running.append(_Unresolved(packed))
    return running[-1]


def _unpack(packed: "_Packed | _Unresolved") -> Tensor:
    if isinstance(packed, _Unresolved):
        return _unpack(packed.packed)
    if isinstance(packed, _RecomputedView):
        return packed.fetch()
    if version_of(packed.tensor) != packed.version:
        raise RuntimeError(CHANGED)
    return packed.tensor


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Enter around a forward pass: its backward pass recomputes the results of `keep=False` and `recomputed`."""
    token = _recomputable.set({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack_unresolved, _unpack):
            yield
    finally:
        _recomputable.reset(token)
