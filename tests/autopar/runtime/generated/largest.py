"""The memory of the tensors that are made."""

from torch import Tensor

from passes._torch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple) else (made,):
            self.bytes = max(self.bytes, item.untyped_storage().nbytes() if isinstance(item, Tensor) else 0)
        return made
