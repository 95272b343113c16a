"""Messages that the stages of this rank have sent in a step."""

from collections.abc import Mapping, Sequence

from torch.distributed import P2POp, Work

from autopar._torch import start_messages
from passes.cost.schedules import Action, Message


class SentMessages:
    """Messages under way, which hold the memory that is sent.

    torch's schedules hold them until the step ends. Here each one is waited for at the first action that begins when
    its arrival is certain (`arrived`, by these actions), so that nothing waits.
    """

    def __init__(self, arrived: Mapping[Action, Sequence[Message]]) -> None:
        self._arrived = {(action.kind == "F", action.stage, action.micro_batch): own for action, own in arrived.items()}
        self._works: dict[Message, list[Work]] = {}

    def start(self, message: Message, operations: list[P2POp]) -> None:
        """Send a message."""
        self._works[message] = start_messages(operations)

    def begin(self, stage: int, micro_batch: int, *, forward: bool) -> None:
        """Let go of what has arrived when the forward or backward pass of a micro-batch begins."""
        for message in self._arrived.get((forward, stage, micro_batch), ()):
            self._wait(message)

    def finish(self) -> None:
        """Wait for all messages that are still under way."""
        for message in list(self._works):
            self._wait(message)

    def clear(self) -> None:
        """Forget all messages, after an exception."""
        self._works.clear()

    def _wait(self, message: Message) -> None:
        for work in self._works.pop(message, ()):
            work.wait()
