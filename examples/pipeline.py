"""Train a stock Llama in pipeline stages on four CPU ranks, and compare the losses with one device.

    torchrun --nproc-per-node 4 examples/pipeline.py

The mesh has two stages of two ranks each. The planner chooses the cut, the schedule and the number of micro-batches;
every rank holds the parameters of its stage alone. The text is the source code of Python's standard library, byte by
byte.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from examples.train_llama import batch_at, library_bytes

TOLERANCE = 1e-4
SAMPLES, LENGTH = 8, 128


def stock_model() -> LlamaForCausalLM:
    """The same model on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def train(mesh: DeviceMesh, steps: int) -> tuple[float, float]:
    """The largest difference between the losses of the distributed model and of one device, and the part of the model's
    parameters that this rank's stage has."""
    data = library_bytes(1 << 20)
    model = stock_model()
    dist_model = autopar.parallelize(model, mesh, batch_at(data, 0, SAMPLES, LENGTH), cluster="cpu")
    first = dist.get_rank() == 0
    if first:
        print(f"{dist_model.plan}\n")
    held = sum(parameter.numel() for parameter in dist_model.parameters())
    part = held / sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(dist_model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(steps):
        batch = batch_at(data, step, SAMPLES, LENGTH)
        loss = dist_model.forward_backward(**batch).loss.item()
        optimizer.step()
        optimizer.zero_grad()
        expected = model(**batch, use_cache=False).loss
        expected.backward()
        reference.step()
        reference.zero_grad()
        worst = max(worst, abs(loss - expected.item()))
        if first:
            print(f"step {step + 1}: loss {loss:.6f}, on one device {expected.item():.6f}")
    return worst, part


def main() -> None:
    """Plan, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    worst, part = train(mesh, arguments.steps)
    print(f"rank {dist.get_rank()} holds the parameters of its stage: {part:.0%} of the model's")
    dist.destroy_process_group()
    if worst > TOLERANCE:
        raise SystemExit(f"the losses differ by {worst:.1e}")


if __name__ == "__main__":
    main()
