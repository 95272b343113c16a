"""Train from a data loader that gives each rank its own samples, and evaluate on every sample once.

    torchrun --nproc-per-node 4 examples/data_loading.py

Samples are split over the data axis of the mesh alone: ranks along the other axis load the same ones. A
`DistributedSampler` repeats a few samples so that all shares are equal; the last batch of an epoch is smaller than the
others. The evaluation repeats none, so that the last batch has more rows on some ranks than on others.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

# The axes that samples are split over, and the samples that each of their ranks has in a batch.
AXES = ("dp",)
SHARE = 4
EPOCHS = 2
LEARNING_RATE = 1e-2
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=1,
)

Batch = dict[str, torch.Tensor]


class Counting(Dataset[Batch]):
    """Sequences that count up, each from another number."""

    def __init__(self, samples: int, length: int = 16) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Batch:
        tokens = (torch.arange(self.length) * (1 + number % 3) + 5 * number) % CONFIG.vocab_size
        return {"input_ids": tokens, "labels": tokens}


def training_loader(dataset: Dataset[Batch], rank: int, size: int, epoch: int) -> DataLoader[Batch]:
    """The loader of one of `size` shares of the data."""
    sampler = DistributedSampler[Batch](dataset, num_replicas=size, rank=rank, shuffle=True, drop_last=False)
    sampler.set_epoch(epoch)
    return DataLoader(dataset, batch_size=SHARE, sampler=sampler)


def evaluation_loader(dataset: Counting, rank: int, size: int) -> DataLoader[Batch]:
    """The loader of every `size`-th sample from the one called `rank`: no sample is there twice."""
    return DataLoader(Subset(dataset, range(rank, len(dataset), size)), batch_size=SHARE)


def global_batches(dist_model: autopar.DistributedModule, loader: DataLoader[Batch]) -> Iterator[Mapping[str, object]]:
    """The batches of all shares together, for a call on every rank."""
    for batch in loader:
        yield dist_model.from_local(batch, axes=AXES)


def train(dist_model: autopar.DistributedModule, dataset: Dataset[Batch]) -> list[float]:
    """The losses of some epochs with SGD."""
    rank, size = dist_model.data_rank(AXES), dist_model.data_size(AXES)
    optimizer = torch.optim.SGD(dist_model.parameters(), lr=LEARNING_RATE)
    losses = []
    for epoch in range(EPOCHS):
        for batch in global_batches(dist_model, training_loader(dataset, rank, size, epoch)):
            optimizer.zero_grad()
            output = dist_model.forward_backward(**batch)
            optimizer.step()
            losses.append(float(output.loss))
    return losses


@torch.no_grad()
def evaluate(dist_model: autopar.DistributedModule, dataset: Counting) -> float:
    """The mean loss of all samples."""
    rank, size = dist_model.data_rank(AXES), dist_model.data_size(AXES)
    dist_model.eval()
    total = 0.0
    for batch in global_batches(dist_model, evaluation_loader(dataset, rank, size)):
        samples = batch["input_ids"]
        assert isinstance(samples, torch.Tensor)
        total += float(dist_model(**batch).loss) * len(samples)
    dist_model.train()
    return total / len(dataset)


def parallel_model(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> autopar.DistributedModule:
    """A stock model, planned for batches of `SHARE` samples per rank of the data axis."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(dtype)
    batch = torch.empty(SHARE * mesh[AXES[0]].size(), 16, dtype=torch.int64, device="meta")
    return autopar.parallelize(model, mesh, {"input_ids": batch, "labels": batch})


def main() -> None:
    """Train and evaluate."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    dist_model = parallel_model(mesh)
    losses = train(dist_model, Counting(22))
    evaluated = evaluate(dist_model, Counting(21))
    if dist.get_rank() == 0:
        print("losses of training:", ", ".join(f"{loss:.4f}" for loss in losses))
        print(f"loss of the evaluation: {evaluated:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
