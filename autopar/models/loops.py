"""Functions of `transformers` that loop over a sequence where their kernels are not at hand. A trace has an op for each
step of each layer; these are traced as what computes the same without the loop, with operators of `passes.scans`."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from autopar.models.delta_rule import gated_delta_rule
from autopar.models.mamba import mamba_scan
from passes.capture.source import replaced
from passes.ir.log import logger

Given = Tensor | int | bool | None
Function = Callable[..., Tensor | tuple[Tensor, Tensor | None]]

# By the name that they have in modules of `transformers`. What replaces a function takes those of its arguments that
# change the result; a version whose function lacks one of them keeps its own, and so does a call that gives another.
_WITHOUT_LOOPS: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba_selective_scan": mamba_scan,
}
# Arguments for kernels: without these `transformers` refuses or ignores them.
_DOCUMENTS = ("cu_seqlens", "seq_idx")
# Arguments that choose how the same result is computed.
_METHODS = {"use_mambapy", "use_associative_scan"}


@contextmanager
def without_loops(model: nn.Module) -> Iterator[None]:
    """Enter around a trace of `model`: functions of the modules of its classes compute without loops."""
    with ExitStack() as stack:
        for module in sorted({type(part).__module__ for part in model.modules()}):
            for name, function in _WITHOUT_LOOPS.items():
                original: Function | None = getattr(sys.modules.get(module), name, None)
                if original is None:
                    continue
                if _arguments(function) <= _arguments(original):
                    called = partial(_called, original, function)
                    stack.enter_context(replaced(sys.modules[module], name, called))
                else:
                    logger.info("this version of transformers has another %s, which is traced in its loops", name)
        yield


def _called(
    original: Function, function: Function, *given: Given, **named: Given
) -> Tensor | tuple[Tensor, Tensor | None]:
    """A call of a function of `transformers`: of `function`, unless an argument is given that it does not take."""
    signature, taken = inspect.signature(original), _arguments(function)
    arguments = signature.bind(*given, **named).arguments
    others = (
        parameter
        for name, parameter in signature.parameters.items()
        if name not in taken | _METHODS and parameter.kind is not parameter.VAR_KEYWORD
    )
    is_given = any(arguments.get(other.name, other.default) is not other.default for other in others)
    if is_given or any(named.get(name) is not None for name in _DOCUMENTS):
        return original(*given, **named)
    return function(**{name: arguments[name] for name in taken if name in arguments})


def _arguments(function: Function) -> set[str]:
    return set(inspect.signature(function).parameters)
