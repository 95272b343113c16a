"""Loops that a trace unrolls: a model that loops over its sequence gives a program that grows with the sequence."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType

from passes.capture.source import Line, is_foreign

# A line may run as often in one call, or once for so many tokens: layers, experts and blocks of a sequence are fewer.
_ALLOWED, _TOKENS = 256, 32


class UnrolledError(Exception):
    """A loop at `line` is unrolled, `times` so far."""

    def __init__(self, line: Line, times: int) -> None:
        super().__init__(
            f"this line has run {times} times in one call, so a loop over the samples or the sequence is unrolled, and "
            "the program grows with their number: use a version of the model that computes all steps by one operator "
            "or in blocks, or pass shorter inputs"
        )
        self.line = line


@dataclass
class _Call:
    """A call of a function: how often each instruction has called operators, and the last one, with the frame that it
    called. Both frames are held, so that no later one is taken for them."""

    frame: FrameType
    counts: Counter[int] = field(default_factory=Counter)
    last: tuple[int, FrameType | None] | None = None


class Loops:
    """Counts how often each line of a model runs in one call. `lengths` are the sizes of the model's inputs, `caller`
    is the file that calls the model."""

    def __init__(self, lengths: Iterable[int], caller: str) -> None:
        self.caller = caller
        self.most = max(_ALLOWED, max(lengths, default=0) // _TOKENS)
        self.calls: dict[CodeType, _Call] = {}

    def note(self, frame: FrameType) -> None:
        """Count an operator that is called from `frame`. Raises UnrolledError."""
        child: FrameType | None = None
        above: FrameType | None = frame
        while above is not None and above.f_code.co_filename != self.caller:
            if not is_foreign(above.f_code.co_filename):
                self._count(above, child)
            child, above = above, above.f_back

    def _count(self, frame: FrameType, child: FrameType | None) -> None:
        call = self.calls.get(frame.f_code)
        if call is None or call.frame is not frame:
            call = self.calls[frame.f_code] = _Call(frame)
        if call.last is not None and call.last[0] == frame.f_lasti and call.last[1] is child:
            return
        call.last = frame.f_lasti, child
        call.counts[frame.f_lasti] += 1
        if call.counts[frame.f_lasti] > self.most:
            raise UnrolledError(Line(frame.f_code.co_filename, frame.f_lineno), self.most)
