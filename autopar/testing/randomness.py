"""Dropout switched off, and other ops that draw random numbers found, for comparisons of a model with itself.

Both are modes of torch, which hold for the thread that enters them: nothing is patched, and no other thread meets them.
"""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from passes._torch import OpOverload, TorchDispatchMode, schema_of

_Function = Callable[..., object]

# How dropout is switched off in the functions that have it: the argument's name and place, and its value.
_OFF: Mapping[_Function, tuple[str, int, object]] = {
    **{
        getattr(functional, name): ("training", 2, False)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    },
    **{
        getattr(torch, name): ("train", 2, False)
        for name in (
            "dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_",
            "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout",
        )
    },
    functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    functional.multi_head_attention_forward: ("dropout_p", 10, 0.0),
    **{getattr(torch, name): ("dropout", 5, 0.0) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}  # fmt: skip


class WithoutDropout(TorchFunctionMode):
    """While entered, dropout does nothing, however a model asks for it: by a module, a function, or as a number that
    it passes to attention."""

    def __torch_function__(
        self,
        function: _Function,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        switch = _OFF.get(function)
        if switch is None:
            return function(*args, **given)
        name, place, off = switch
        if len(args) > place:
            return function(*args[:place], off, *args[place + 1 :], **given)
        return function(*args, **{**given, name: off})


class RandomOps(TorchDispatchMode):
    """While entered, remembers the ops that draw random numbers: `found` has name and line of the model's code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **given)
        before = torch.get_rng_state()
        result: object = function(*args, **given)
        # Dropout with a probability of zero draws nothing; a generator of the model's own has a state of its own.
        if given.get("generator") is not None or not torch.equal(before, torch.get_rng_state()):
            self.found[f"{schema_of(function).name.removeprefix('aten::')} at {_calling_line()}"] = None
        return result


def _calling_line() -> str:
    """The innermost line outside of torch and of this file."""
    own = (str(Path(torch.__file__).parent), __file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
