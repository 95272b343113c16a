"""Ranks, as models see them while they are traced: there is one process, which computes what all ranks compute
together, and it sends nothing.

A custom `torch.autograd.Function` of a model runs as it is in generated code, on all ranks, so it must neither ask for
ranks nor send anything.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import cast

from torch import distributed, nn

from passes._torch import OpOverload, TorchDispatchMode, operator_name
from passes.capture.caches import owners, packages_of
from passes.capture.source import TORCH, line_of_frame, replaced
from passes.ir.errors import CaptureError

# Namespaces of torch's collectives.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_COMPUTED = "but a distributed module computes what one device does with the whole batch: leave it out"


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


def as_one_process(module: nn.Module) -> AbstractContextManager[None]:
    """A context within which there is no process group for this thread: the rank is 0 of 1, for any group. So a model
    neither guards collectives of its own by the number of ranks nor computes with that number.

    Also replaced are these functions where a module of the packages of `module` has imported them by name.
    """
    return _answered(_ANSWERS, packages_of(module))


@contextmanager
def _answered(answers: Mapping[str, Callable[..., object]], packages: Set[str]) -> Iterator[None]:
    """A context with other functions in place of those of `torch.distributed`, also in modules of some packages."""
    functions = {id(getattr(distributed, name)): answer for name, answer in answers.items()}
    places: list[tuple[ModuleType, str, Callable[..., object]]] = [
        (distributed, name, answer) for name, answer in answers.items()
    ]
    for owner in owners(packages):
        if isinstance(owner, ModuleType):
            own = vars(owner).items()
            places += [(owner, name, functions[id(value)]) for name, value in own if id(value) in functions]
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(replaced(*place))
        yield


def communicates(function: object) -> str | None:
    """The reason why an operator cannot be part of a model, if it is a collective."""
    if not isinstance(function, OpOverload) or function.namespace not in _COLLECTIVES:
        return None
    return f"communicates between ranks by itself ({operator_name(function).strip('_')}), {_COMPUTED}"


@contextmanager
def refused_in(function: str) -> Iterator[None]:
    """A context in which the custom function at a path runs: it must neither communicate nor ask for ranks.

    Raises CaptureError where it does.
    """

    def refusal(reason: str) -> CaptureError:
        line = line_of_frame(sys._getframe(2))
        where = "" if line is None else f" at {line.file}:{line.number}"
        return CaptureError(f"the autograd.Function {function}{where} {reason}")

    def question(name: str) -> Callable[..., object]:
        original = cast(Callable[..., object], getattr(distributed, name))

        def refuse(*given: object) -> object:
            # Above it is the frame of what replaces the function.
            if sys._getframe(2).f_code.co_filename.startswith(TORCH):
                return original(*given)
            raise refusal(f"asks for ranks ({name}), {_COMPUTED}")

        return refuse

    class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            called: OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            if (reason := communicates(called)) is not None:
                raise refusal(reason)
            return called(*args, **(kwargs or {}))

    packages = {function.partition(":")[0].partition(".")[0]}
    with _answered({name: question(name) for name in _ANSWERS}, packages), Refusing():  # type: ignore[no-untyped-call]
        yield
