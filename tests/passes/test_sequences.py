"""The ops at which a split of the sequence ends, and the sentences of plans about it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autopar
from passes.regions import fold
from passes.sequences import sequence_splits
from tests.passes.helpers import normalized

IDS = torch.zeros(2, 16, dtype=torch.long)


class Mixer(nn.Module):
    """Tokens that a function mixes, between an embedding and a head."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.mix = mix

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, length]."""
        return self.head(self.mix(self.embed(ids))).square().sum()


def _recurrence(x: Tensor) -> Tensor:
    """x: [batch, length, width], one token after the other."""
    state, found = x[:, 0], []
    for place in range(4):
        state = state * 0.5 + x[:, place]
        found.append(state)
    return torch.stack(found, 1)


def _chunks(x: Tensor) -> Tensor:
    """Sums within chunks of four, and of the chunks before."""
    chunks = x.reshape(2, 4, 4, 4)
    states = F.pad(chunks.sum(2), (0, 0, 1, 0)).cumsum(1)[:, :4]
    return (chunks.cumsum(2) + states[:, :, None]).reshape(2, 16, 4)


# What mixes tokens, and the ops that need them whole: kind, dim and its size.
MIXED: dict[str, tuple[Callable[[Tensor], Tensor], set[tuple[str, int, int]]]] = {
    "a recurrence": (_recurrence, {("select", 1, 16)}),
    "chunks": (_chunks, {("pad", 1, 4)}),
    "a running sum": (lambda x: x.cumsum(1), set()),
    "a mean": (lambda x: x - x.mean(1, keepdim=True), set()),
    "a shift": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :16], {("pad", 1, 16)}),
    "attention": (lambda x: F.scaled_dot_product_attention(*(x[:, None],) * 3, is_causal=True)[:, 0], set()),
    "a causal convolution": (
        lambda x: F.conv1d(x.mT, torch.ones(4, 1, 3), padding=2, groups=4)[..., :16].mT,
        set(),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_splits_end_where_an_op_needs_all_tokens(name: str) -> None:
    mix, expected = MIXED[name]
    program = normalized(Mixer(mix), ids=IDS)
    found = sequence_splits(fold(program), 2)
    assert {(end.op.kind, end.dim, end.size) for end in found.ends} == expected
    (embedded,) = (op.results[0] for op in program.ops if op.kind == "embedding")
    assert list(map(str, found.placements[embedded])) == ["S(1)"]


@pytest.mark.parametrize("objective", ["train", "infer"])
def test_plans_name_what_is_not_split_over_the_sequence(objective: str) -> None:
    """In one line for each axis that splits the sequence elsewhere, and none where nothing does."""
    split = {"embed/embedding": {"out": {"cp": "S(1)"}}, "head/linear": {"in": {"cp": "S(1)"}}}
    model, inputs = Mixer(_recurrence), {"ids": IDS}
    plan = autopar.plan(model, {"cp": 2}, inputs, cluster="ideal", constraints=split, objective=objective)
    assert plan.unsplit_over_sequence == ("'cp': /select (4 ops) takes one place of dim 1 of size 16",)
    line = "not split over the sequence on 'cp': /select (4 ops) takes one place of dim 1 of size 16"
    assert line in str(plan).splitlines()
    assert autopar.Plan.from_json(plan.to_json()) == plan
    samples = {"embed/embedding": {"out": {"cp": "S(0)"}}, "head/linear": {"in": {"cp": "S(0)"}}}
    plan = autopar.plan(model, {"cp": 2}, inputs, cluster="ideal", constraints=samples)
    assert plan.unsplit_over_sequence == ()
    assert "not split over the sequence" not in str(plan)
