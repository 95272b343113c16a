"""Training from data loaders is training on the batches of all shares."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from autopar.testing import LiftFloat32, run_ranks
from examples import data_loading
from examples.data_loading import Batch, Counting, evaluation_loader, training_loader


def joined(loaders: list[DataLoader[Batch]]) -> Iterator[Batch]:
    """The batches of all shares, one after the other."""
    for parts in zip(*loaders, strict=True):
        yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def expected() -> tuple[list[float], float, list[int]]:
    """The losses on one device, and the sizes of all batches."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(data_loading.CONFIG).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=data_loading.LEARNING_RATE)
    losses, sizes, total = [], [], 0.0
    for epoch in range(data_loading.EPOCHS):
        for batch in joined([training_loader(Counting(22), rank, 2, epoch) for rank in range(2)]):
            optimizer.zero_grad()
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            sizes.append(len(batch["input_ids"]))
    for batch in joined([evaluation_loader(Counting(21), rank, 2) for rank in range(2)]):
        total += float(model(**batch, use_cache=False).loss) * len(batch["input_ids"])
        sizes.append(len(batch["input_ids"]))
    return losses, total / 21, sizes


def _on_ranks() -> bool:
    with LiftFloat32(torch.float64):
        dist_model = data_loading.parallel_model(
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.float64
        )
        losses = data_loading.train(dist_model, Counting(22))
        evaluated = data_loading.evaluate(dist_model, Counting(21))
        own, other, sizes = expected()
    assert sizes == [8, 8, 6, 8, 8, 6, 8, 8, 5]
    assert torch.allclose(torch.tensor(losses), torch.tensor(own), rtol=1e-9)
    return abs(evaluated - other) <= 1e-9 * other


@pytest.mark.long
def test_losses_are_those_of_one_device() -> None:
    """With a `DataLoader` and a `DistributedSampler` on four ranks, smaller and uneven last batches included."""
    assert run_ranks(_on_ranks, 4) == [True] * 4
