"""Answers of `torch.distributed` to a model: it runs in one process, which computes what all ranks compute together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType

from torch import distributed, nn

from passes.capture.caches import owners
from passes.capture.source import replaced


def _not_initialized() -> bool:
    return False


def _only_rank(group: object = None) -> int:
    return 0


def _only_size(group: object = None) -> int:
    return 1


# Names in `torch.distributed`, with what stands in their place.
_ANSWERS: Mapping[str, Callable[..., object]] = {
    "is_initialized": _not_initialized,
    "get_rank": _only_rank,
    "get_world_size": _only_size,
}


@contextmanager
def as_one_process(module: nn.Module) -> Iterator[None]:
    """Within, there is no process group for this thread: the rank is 0 of 1, for any group. So a model neither guards
    collectives of its own by the number of ranks nor computes with that number.

    Also replaced are these functions where a module of the packages of `module` has imported them by name.
    """
    functions = {id(getattr(distributed, name)): answer for name, answer in _ANSWERS.items()}
    places: list[tuple[ModuleType, str, Callable[..., object]]] = [
        (distributed, name, answer) for name, answer in _ANSWERS.items()
    ]
    for owner in owners(module):
        if isinstance(owner, ModuleType):
            own = vars(owner).items()
            places += [(owner, name, functions[id(value)]) for name, value in own if id(value) in functions]
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(replaced(*place))
        yield
