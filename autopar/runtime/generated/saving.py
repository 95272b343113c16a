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
class _Made:
    """A result that backward recomputes: its sources, its function, and how often autograd saved it or a view of it."""

    storage: StorageWeakRef
    sources: "tuple[_Packed, ...]"
    run: Callable[..., Tensor]
    uses: int = 0
    again: Tensor | None = field(default=None, repr=False)

    def use(self) -> None:
        """Count that autograd saves the result, or a view of it, by its sources."""
        if not self.uses:
            for source in self.sources:
                if isinstance(source, _View):
                    source.made.use()
        self.uses += 1

    def fetch(self) -> Tensor:
        """Return the recomputed result; it is dropped after its last use."""
        result = self.again
        if result is None:
            with torch.no_grad():
                result = self.run(*map(_unpack, self.sources))
        self.uses -= 1
        self.again = result if self.uses > 0 else None
        return result


@dataclass(frozen=True)
class _Kept:
    """A tensor that is saved as it is, and its version at that time."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _View:
    """A view of a recomputed result, possibly a real, imaginary, conjugate or negative view."""

    made: _Made
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    is_conj: bool
    is_neg: bool

    def fetch(self) -> Tensor:
        """Return the same view of the recomputed result."""
        found = self.made.fetch()
        conj, neg = found.is_conj(), found.is_neg()
        if found.dtype == self.dtype:
            view = found.as_strided(self.shape, self.stride, self.offset)
        else:
            conj = neg = False
            view = torch.empty(0, dtype=self.dtype, device=found.device)
            view.set_(found.untyped_storage(), self.offset, self.shape, self.stride)
        view = view.conj() if conj != self.is_conj else view
        return view.neg() if neg != self.is_neg else view


_Packed = _Kept | _View


@dataclass
class _Own:
    """A tensor that autograd saves while an op runs; it may be the op's result."""

    packed: _Packed


# What autograd has kept of the op that runs and will be noted.
_running: ContextVar[list[_Own] | None] = ContextVar("running", default=None)

_noted: ContextVar[dict[int, _Made] | None] = ContextVar("noted", default=None)


def note_made(result: Tensor, run: Callable[..., Tensor], *sources: Tensor) -> None:
    """Record that `result` is `run(*sources)` and need not be saved for backward.

    Does nothing outside `saving()`, nor where `result` is one of `sources` or a view of it.
    """
    noted = _noted.get()
    if noted is None or not torch.is_grad_enabled():
        return
    place = storage_id(result)
    if any(storage_id(source) == place for source in sources):
        return
    # What nobody holds any more will not be kept either; until then it holds what it was made from.
    for gone in [key for key, made in noted.items() if made.storage.expired()]:  # type: ignore[no-untyped-call]
        del noted[gone]
    storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
    noted[storage.cdata] = _Made(storage, tuple(map(_noted_or_kept, sources)), run)


def recomputed(run: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return `run(*operands)`; backward recomputes it from the operands, or from the sources that these come from.

    In code compiled by torch, its own partitioner chooses the saved tensors and recomputes cheap ops.
    """
    if torch.compiler.is_compiling():
        return run(*operands)
    kept: list[_Own] = []
    token = _running.set(kept)
    try:
        result = run(*operands)
    finally:
        _running.reset(token)
    if not torch.is_autocast_enabled(result.device.type):
        note_made(result, run, *operands)
        # What autograd kept of the result before it was noted.
        for own in kept:
            if isinstance(own.packed, _Kept):
                own.packed = _pack(own.packed.tensor)
    return result


def _noted_or_kept(tensor: Tensor) -> _Packed:
    noted = _noted.get()
    made = noted.get(storage_id(tensor)) if noted else None
    if made is None:
        return _Kept(tensor.detach(), version_of(tensor))
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    return _View(made, tensor.dtype, shape, stride, offset, tensor.is_conj(), tensor.is_neg())


def _pack(tensor: Tensor) -> _Packed:
    packed = _noted_or_kept(tensor)
    if isinstance(packed, _View):
        packed.made.use()
    return packed


def _pack_own(tensor: Tensor) -> "_Packed | _Own":
    """Pack a tensor that autograd saves while an op runs whose result will be recorded: it may be that result."""
    packed, kept = _pack(tensor), _running.get()
    if kept is None or isinstance(packed, _View):
        return packed
    kept.append(_Own(packed))
    return kept[-1]


def _unpack(packed: "_Packed | _Own") -> Tensor:
    if isinstance(packed, _Own):
        return _unpack(packed.packed)
    if isinstance(packed, _View):
        return packed.fetch()
    if version_of(packed.tensor) != packed.version:
        raise RuntimeError(CHANGED)
    return packed.tensor


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Enter around a forward pass: its backward pass recomputes the results of `keep=False` and `recomputed`."""
    token = _noted.set({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack_own, _unpack):
            yield
    finally:
        _noted.reset(token)
