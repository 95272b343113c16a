"""Finetune a stock Llama on four processes: everything that surrounds the model in a training script.

    torchrun --nproc-per-node 4 examples/finetune.py --folder out

The script takes a folder that `from_pretrained` loads, and writes one. In between: a data loader that gives each rank
its own samples, accumulation of gradients, clipping, a learning-rate schedule, evaluation, checkpoints, and resuming:
started again with more `--epochs`, it goes on from its last checkpoint. The data is the source code of Python's
standard library, byte by byte.
"""

import argparse
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

# The axes of the mesh that samples are split over.
AXES = ("dp",)
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
)
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings of a run: `batch` counts samples of all devices together, `accumulate` batches make a step."""

    folder: Path
    epochs: int = 2
    batch: int = 8
    accumulate: int = 2
    samples: int = 43
    held_out: int = 13
    length: int = 32
    learning_rate: float = 1e-3
    largest_norm: float = 1.0
    dtype: torch.dtype = torch.float32


class LibraryText(Dataset[dict[str, Tensor]]):
    """Samples of `length` bytes, int64, of the sources of the standard library; labels are the bytes themselves."""

    def __init__(self, first: int, samples: int, length: int) -> None:
        path = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(torch.int64)
        self.rows = text[first * length : (first + samples) * length].reshape(samples, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Progress:
    """Everything of a run that a checkpoint holds, in the form that `torch.distributed.checkpoint` asks for."""

    def __init__(self, model: autopar.DistributedModule, optimizer: Optimizer, schedule: LRScheduler) -> None:
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.epoch = 0

    def state_dict(self) -> dict[str, object]:
        """The state as tensors and numbers, each rank its part."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "random": self.model.random.get_state(),
            "epoch": self.epoch,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take the state that a checkpoint holds."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.model.random.set_state(state["random"])
        self.epoch = state["epoch"]


def learning_rate(step: int) -> float:
    """The factor of the learning rate at a step."""
    return 1 / math.sqrt(1 + step)


def groups_of(batches: Iterator[Batch], count: int) -> Iterator[Sequence[Batch]]:
    """Batches in groups of `count`; the last group may be shorter."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == count:
            yield group
            group = []
    if group:
        yield group


def train_epoch(
    dist_model: autopar.DistributedModule, progress: Progress, loader: DataLoader[Batch], settings: Settings
) -> float:
    """One pass over the data; returns the mean loss of its steps."""
    optimizer, schedule = progress.optimizer, progress.schedule
    losses = []
    for group in groups_of(iter(loader), settings.accumulate):
        step_loss = 0.0
        for number, own in enumerate(group):
            # Each rank has its own samples; together they are the global batch.
            batch = dist_model.from_local(own, axes=AXES)
            loss = dist_model(**batch).loss / len(group)
            if number < len(group) - 1:
                with dist_model.holding_gradients():
                    loss.backward()
            else:
                loss.backward()
            step_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(dist_model.parameters(), settings.largest_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(step_loss)
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(dist_model: autopar.DistributedModule, loader: DataLoader[Batch]) -> float:
    """The perplexity on a loader's samples."""
    dist_model.eval()
    total, count = 0.0, 0
    for own in loader:
        batch = dist_model.from_local(own, axes=AXES)
        samples = len(batch["input_ids"])
        total += dist_model(**batch).loss.item() * samples
        count += samples
    dist_model.train()
    return math.exp(total / count)


def training_loader(settings: Settings, rank: int, size: int) -> DataLoader[Batch]:
    """The loader of one of `size` shares of each batch; a sampler repeats samples so that the shares are equal."""
    dataset = LibraryText(0, settings.samples, settings.length)
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=True)
    return DataLoader(dataset, batch_size=settings.batch // size, sampler=sampler)


def held_out_loader(settings: Settings, rank: int, size: int) -> DataLoader[Batch]:
    """The loader of every `size`-th sample for evaluation; no sample is repeated, so the last batch may be uneven."""
    dataset = LibraryText(settings.samples, settings.held_out, settings.length)
    return DataLoader(Subset(dataset, range(rank, settings.held_out, size)), batch_size=settings.batch // size)


def export(dist_model: autopar.DistributedModule, folder: Path) -> None:
    """Write the model to a folder that `from_pretrained` loads."""
    state = dist_model.full_state_dict()
    if dist.get_rank() == 0:
        with torch.device("meta"):
            stock = LlamaForCausalLM(dist_model.config)
        stock.save_pretrained(folder, state_dict=state)
    dist.barrier()


def finetune(settings: Settings, mesh: DeviceMesh) -> float:
    """Train, or go on with training; returns the perplexity at the end."""
    first = dist.get_rank() == 0
    start = settings.folder / "start"
    if first and not start.exists():
        # A model to begin with, as a hub would have it.
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(start)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(start, dtype=settings.dtype)

    tokens = torch.zeros(settings.batch, settings.length, dtype=torch.int64)
    dist_model = autopar.parallelize(model, mesh, {"input_ids": tokens, "labels": tokens}, cluster="ideal")
    rank, size = dist_model.data_rank(AXES), dist_model.data_size(AXES)
    loader, held_out = training_loader(settings, rank, size), held_out_loader(settings, rank, size)

    optimizer = torch.optim.AdamW(dist_model.parameters(), lr=settings.learning_rate)
    schedule = LambdaLR(optimizer, learning_rate)
    progress = Progress(dist_model, optimizer, schedule)
    checkpoint = settings.folder / "checkpoint"
    if checkpoint.exists():
        dcp.load({"progress": progress}, checkpoint_id=checkpoint)
    for epoch in range(progress.epoch, settings.epochs):
        loader.sampler.set_epoch(epoch)
        loss = train_epoch(dist_model, progress, loader, settings)
        progress.epoch = epoch + 1
        dcp.save({"progress": progress}, checkpoint_id=checkpoint)
        perplexity = evaluate(dist_model, held_out)
        if first:
            print(f"epoch {epoch}: loss {loss:.4f}, perplexity on held-out text {perplexity:.2f}")
    export(dist_model, settings.folder / "tuned")
    return evaluate(dist_model, held_out)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for models and checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    perplexity = finetune(Settings(arguments.folder, arguments.epochs), mesh)
    if dist.get_rank() == 0:
        print(f"perplexity {perplexity:.2f}; the tuned model lies in {arguments.folder / 'tuned'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
