"""`torch.export` without what it makes on the way and nobody reads, which takes more than half of its time.

- The code of graph modules: each edit of a graph prints and compiles it anew, though no pass of `torch.export` runs it.
- Checks of graphs that are in the making: the last graph is checked once.
- The text of all frames at each operator: `source.line_of_node` reads the numbers of lines of the model alone.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from passes._torch import SUMMARY_OF_FRAMES, tracebacks
from passes.capture.source import is_foreign, replaced


@contextmanager
def nothing_unread() -> Iterator[None]:
    """Within, this thread's graph modules are compiled when they are first called, graphs are not checked, and stack
    traces have the frames of models alone, without the text of their lines."""
    with (
        replaced(torch.fx.GraphModule, "recompile", _recompile_when_called),
        replaced(torch.fx.Graph, "lint", _unchecked),
        replaced(tracebacks, SUMMARY_OF_FRAMES, _frames_of_models),
    ):
        yield


# The method as torch has it: modules that were made within may be called when nothing is replaced any more.
_recompile = torch.fx.GraphModule.recompile


def _recompile_when_called(module: torch.fx.GraphModule) -> None:
    """Leave the code of `module` for its first call. Every graph module has a class of its own."""

    def forward(called: torch.fx.GraphModule, *args: object, **kwargs: object) -> object:
        _recompile(called)
        return called(*args, **kwargs)

    type(module).forward = forward


def _unchecked(graph: torch.fx.Graph) -> None:
    """In place of `Graph.lint`."""


def _frames_of_models(frames: Sequence[Mapping[str, object]], skip: int) -> traceback.StackSummary:
    """The summary of a stack from its innermost frame on, without the first `skip`. It has the frames of models, and
    those by which torch finds where a model begins: they are called "forward"."""
    found = traceback.StackSummary()
    for frame in reversed(frames[skip:]):
        file, name, number = str(frame["filename"]), str(frame["name"]), frame["line"]
        if name == "forward" or not is_foreign(file):
            assert isinstance(number, int)
            found.append(traceback.FrameSummary(file, number, name, lookup_line=False, line=""))
    return found
