"""Periodic comparison of the values of batches between ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.checksums import Checksums
from passes.ir.errors import InputError
from passes.ir.mesh import Mesh

# Values are compared the first two times, and then every time whose number this divides.
EVERY = 100


@dataclass(frozen=True)
class Leaf:
    """This rank's part of a tensor; ranks have other parts on the axes `split_on` of the mesh, and equal ones on all
    others."""

    name: str
    part: Tensor
    split_on: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Taken:
    """Checksums that are still to be compared, and the number of their call."""

    call: int
    leaves: Sequence[tuple[str, frozenset[int]]]
    sums: Checksums


class ValueComparison:
    """Compares the parts that ranks should have alike, by checksums that are taken where the tensors are.

    The first comparison waits for them; later ones are read at the next call, when they are there.
    """

    def __init__(self, agreement: Agreement, mesh: Mesh, what: str, advice: str) -> None:
        """`what` is called, and `advice` is given where all ranks should have the same tensor."""
        self._agreement = agreement
        self._mesh = mesh
        self._coordinates = list(mesh.coordinates())
        self._what = what
        self._advice = advice
        self._pending: _Taken | None = None

    def compare(self, number: int, leaves: Sequence[Leaf]) -> None:
        """Compare the values of an earlier call, and take those of this one, the `number`-th from 1, where it is due.

        Collective over the mesh; all ranks give the same names. Raises InputError on all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(pending)
        if number > 2 and number % EVERY:
            return
        sums = Checksums([leaf.part for leaf in leaves])
        taken = _Taken(number, [(leaf.name, leaf.split_on) for leaf in leaves], sums)
        if number == 1:
            self._read(taken)
        else:
            self._pending = taken

    def _read(self, taken: _Taken) -> None:
        every = self._agreement.numbers(taken.sums.read())
        for column, (name, split_on) in enumerate(taken.leaves):
            first: dict[tuple[int, ...], int] = {}
            for rank, sums in enumerate(every):
                part = tuple(place for axis, place in enumerate(self._coordinates[rank]) if axis in split_on)
                other = first.setdefault(part, rank)
                if sums[column] != every[other][column]:
                    self._raise(taken.call, name, rank, other, split_on)

    def _raise(self, call: int, name: str, rank: int, other: int, split_on: frozenset[int]) -> NoReturn:
        said = (
            f"{name} had other values on rank {rank} of the mesh than on rank {other} in {self._what} {call} of this "
            "module"
        )
        if split_on:
            names = self._mesh.names
            split = ", ".join(name for axis, name in enumerate(names) if axis in split_on)
            same = ", ".join(name for axis, name in enumerate(names) if axis not in split_on)
            raise InputError(
                f"{said}: it is split over {split}, so ranks along {same} must give the same part (a sampler takes "
                "its rank from data_rank() of the same axes)"
            )
        raise InputError(f"{said}: {self._advice}")
