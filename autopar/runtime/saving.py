"""What autograd keeps: a tensor that a collective gathered can be kept as its part and gathered again.

Generated code calls collectives with `keep=False` where the plan says so. While `saving()` is entered, such results are
noted; when autograd wants to keep one (or a view of one), what is kept is the tensor that it was gathered from, and the
backward pass runs the collective once more.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class _Gathered:
    """A result that is gathered again: from what, how, and how often autograd kept it or a view of it."""

    storage: StorageWeakRef
    source: Tensor
    run: Callable[[Tensor], Tensor]
    uses: int = 0
    kept: "_Packed | None" = None
    again: Tensor | None = field(default=None, repr=False)

    def use(self) -> None:
        """Autograd keeps the result or a view of it: from here on keep what it is gathered from instead."""
        if self.kept is None:
            self.kept = _pack(self.source)
        self.uses += 1

    def fetch(self) -> Tensor:
        """The result once more; it is dropped after its last use."""
        result = self.again
        if result is None:
            assert self.kept is not None
            with torch.no_grad():
                result = self.run(_unpack(self.kept))
        self.uses -= 1
        self.again = result if self.uses > 0 else None
        return result


@dataclass(frozen=True)
class _Kept:
    """A tensor that is kept as it is, and the version that it had."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _View:
    """A view of a result that is gathered again."""

    gathered: _Gathered
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


_Packed = _Kept | _View

_noted: ContextVar[dict[int, _Gathered] | None] = ContextVar("noted", default=None)


def note_gathered(result: Tensor, source: Tensor, run: Callable[[Tensor], Tensor]) -> None:
    """Note that `result` is `run(source)` and need not be kept.

    Does nothing outside `saving()`, nor where `result` is `source` itself or a view of it.
    """
    noted = _noted.get()
    if noted is None or not torch.is_grad_enabled():
        return
    if result.untyped_storage()._cdata == source.untyped_storage()._cdata:
        return
    storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
    noted[storage.cdata] = _Gathered(storage, source.detach(), run)


def _pack(tensor: Tensor) -> _Packed:
    noted = _noted.get()
    gathered = noted.get(tensor.untyped_storage()._cdata) if noted else None
    if gathered is None:
        return _Kept(tensor.detach(), tensor._version)
    gathered.use()
    return _View(gathered, tensor.shape, tensor.stride(), tensor.storage_offset())


def _unpack(packed: _Packed) -> Tensor:
    if isinstance(packed, _View):
        return packed.gathered.fetch().as_strided(packed.shape, packed.stride, packed.offset)
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            "a tensor that the backward pass needs was changed in place after the forward pass (a parameter, by the "
            "optimizer?): run backward before changing it"
        )
    return packed.tensor


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Enter around a forward pass: what is gathered with `keep=False` in it is gathered again in its backward pass."""
    token = _noted.set({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _noted.reset(token)
