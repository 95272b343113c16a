"""Periodic comparison of the values of batches between ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
        self._pending: Callable[[], None] | None = None

    def compare(self, number: int, leaves: Sequence[Leaf]) -> None:
        """Compare the values of an earlier call, and take those of this one, the `number`-th from 1, where it is due.

        Collective over the mesh; all ranks give the same names. Raises InputError on all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()
        if self._agreement.alone or (number > 2 and number % EVERY):
            return
        read = partial(self._read, number, leaves, Checksums([leaf.part for leaf in leaves]))
        if number == 1:
            read()
        else:
            self._pending = read

    def _read(self, call: int, leaves: Sequence[Leaf], checksums: Checksums) -> None:
        every = self._agreement.numbers(checksums.read())
        for column, leaf in enumerate(leaves):
            first: dict[tuple[int, ...], int] = {}
            for rank, sums in enumerate(every):
                part = tuple(place for axis, place in enumerate(self._coordinates[rank]) if axis in leaf.split_on)
                other = first.setdefault(part, rank)
                if sums[column] != every[other][column]:
                    self._raise(call, leaf, rank, other)

    def _raise(self, call: int, leaf: Leaf, rank: int, other: int) -> NoReturn:
        said = (
            f"{leaf.name} had other values on rank {rank} of the mesh than on rank {other} in {self._what} {call} of "
            "this module"
        )
        if leaf.split_on:
            split, same = (
                ", ".join(name for axis, name in enumerate(self._mesh.names) if (axis in leaf.split_on) == inside)
                for inside in (True, False)
            )
            raise InputError(
                f"{said}: it is split over {split}, so ranks along {same} must give the same part (a sampler takes "
                "its rank from data_rank() of the same axes)"
            )
        raise InputError(f"{said}: {self._advice}")
