"""Models that cannot be parallelized as they are given: parallel already, without sizes, or no Python modules."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from passes.ir.errors import UnsupportedError
from passes.ir.program import sparse_or_nested

# By class, the predicate of a part of it, and what to do instead.
_PARTS: tuple[tuple[type, str], ...] = (
    (
        nn.parallel.DistributedDataParallel,
        "is a DistributedDataParallel, which spreads its batch over ranks: pass its `module`",
    ),
    (nn.DataParallel, "is a DataParallel, which spreads its batch over devices: pass its `module`"),
    (FullyShardedDataParallel, "is a FullyShardedDataParallel: pass the model that it was made of"),
    (FSDPModule, "is sharded by `fully_shard` already: pass the model before it is sharded"),
    (torch.jit.ScriptModule, "is TorchScript, which is not traced: pass the Python module"),
)
_EXPORTED = "was made by torch.export, for one mode and these sizes: pass the module that was exported"


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UnsupportedError for a model that is parallel already, that does not know its sizes, or that is compiled to
    something else than Python."""
    for reason in _reasons(model):
        raise UnsupportedError(reason)


def _reasons(model: nn.Module) -> Iterator[str]:
    for path, part in model.named_modules():
        found = [says for kind, says in _PARTS if isinstance(part, kind)]
        if isinstance(part, torch.fx.GraphModule) and "train" in vars(part):
            found.append(_EXPORTED)
        for says in found:
            yield f"the part {path!r} {says}" if path else f"the model {says}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            yield f"{name!r} is a DTensor: pass the model as it is on one device, before it is distributed"
        if (layout := sparse_or_nested(tensor)) is not None:
            yield f"{name!r} is a {layout} tensor: hold a dense one"
        if is_lazy(tensor):
            yield f"{name!r} has no shape yet: call the model once, so that its lazy modules know their sizes"
