"""How ranks agree: one may compute for all, and an error of one is an error of all."""

import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def together(mesh: DeviceMesh, run: Callable[[], T]) -> T:
    """Run on every rank; if it raises on any, raise on all."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(run())
    except Exception as raised:
        error = raised
    errors = gathered(mesh, None if error is None else _sendable(error))
    if error is not None:
        raise error
    for other in errors:
        if isinstance(other, Exception):
            raise other
    return result[0]


def from_first(mesh: DeviceMesh, run: Callable[[], T]) -> T:
    """Run on the first rank alone; every rank gets what it returned, or raises what it raised."""
    result: T | Exception | None = None
    sent = b""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    if not any(coordinate):
        try:
            result = run()
            sent = pickle.dumps(result)
        except Exception as error:
            result = _sendable(error)
            sent = pickle.dumps(result)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        box = [sent]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        sent = box[0]
    if any(coordinate):
        result = cast(T | Exception, unpickled(sent))
    if isinstance(result, Exception):
        raise result
    assert result is not None
    return result


def unpickled(sent: bytes) -> object:
    """What another process has pickled."""
    with warnings.catch_warnings():
        # A tree's specification warns about its own parts when it is unpickled.
        warnings.simplefilter("ignore", FutureWarning)
        found: object = pickle.loads(sent)
        return found


def _sendable(error: Exception) -> Exception:
    """An exception as it is, if it can travel to other ranks, or one that says what it said."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # Whatever keeps it from being sent, what it says is sent as text.
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def gathered(mesh: DeviceMesh, item: T) -> list[T]:
    """What every rank of the mesh has, in the order of ranks."""
    items = [item]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        boxes: list[list[T]] = [[] for _ in range(group.size())]
        dist.all_gather_object(boxes, items, group=group)
        items = [item for box in boxes for item in box]
    return items
