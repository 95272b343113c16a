"""The declarations of local forms match what they do."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime import vocabulary_cross_entropy
from autopar.runtime.generated.axis import axes_of
from autopar.testing.ranks import run_ranks
from passes.rules.local_forms import LOCAL_FORMS, FormContext


class _Counting(TorchDispatchMode):
    """Notes the collectives that run: name and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, function: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if function.namespace == "_c10d_functional" and "wait" not in function._opname:
            assert isinstance(args[0], Tensor)
            self.seen.append((function._opname, tuple(args[0].shape)))
        return function(*args, **(kwargs or {}))  # type: ignore[arg-type]


def _collectives(tokens: int, classes: int) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """Runs on every rank: the collectives of a cross entropy forward, and how many there are backward."""
    (axis,) = axes_of(init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))
    logits = torch.randn(tokens, classes // 2, requires_grad=True)
    counting = _Counting()
    with counting:
        loss = vocabulary_cross_entropy(
            logits, torch.zeros(tokens, dtype=torch.long), size=classes, digits=((axis, 1),)
        )
        forward = list(counting.seen)
        loss.backward()
    return forward, len(counting.seen) - len(forward)


def test_collectives_of_the_cross_entropy() -> None:
    """The priced collectives run: one all-reduce of a number per token for each statistic, and none backward."""
    about = FormContext(axis=0, ways=2, operands=((6, 8), (6,)), rows=(6,), dim=1, reach=(0, 0))
    priced = LOCAL_FORMS["vocabulary_cross_entropy"].forward(about)
    for forward, backward in run_ranks(_collectives, 2, 6, 16):
        assert forward == [(step.collective, step.before) for step in priced]
        assert backward == sum(step.backward.moves for step in priced) == 0


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_the_busiest_rank_of_causal_attention(ways: int) -> None:
    """The last block of queries has this part of all scores, up to the diagonal."""
    length = 512
    places = torch.arange(length)
    block = places[-(length // ways) :]
    exact = float((block + 1).sum()) / float((places + 1).sum())
    assert LOCAL_FORMS["causal_attention"].share(ways) == pytest.approx(exact, rel=0.01)
    assert LOCAL_FORMS["mean"].share(ways) == 1 / ways
