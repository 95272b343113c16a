"""Train a stock Llama on a sequence that does not fit one device, but four, and compare the losses with one device.

    torchrun --nproc-per-node 4 examples/long_context.py

Each device may use 96 MiB. The planner refuses one device, and on four it splits the sequence. The reference on one
device runs without a limit. The text is the source code of Python's standard library, byte by byte.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from examples.train_llama import batch_at, library_bytes

TOLERANCE = 1e-4
MIB = 1024**2


def stock_model(length: int) -> LlamaForCausalLM:
    """The same model on every rank, for sequences of up to `length` tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def refusal(model: torch.nn.Module, batch: dict[str, torch.Tensor], limit_bytes: float) -> str:
    """The sentence in which the planner refuses one device; empty if it does not."""
    try:
        autopar.plan(model, 1, batch, cluster="cpu", memory_limit=limit_bytes)
    except autopar.InfeasibleError as error:
        return str(error)
    return ""


def train(mesh: DeviceMesh, steps: int, length: int, limit_bytes: float) -> tuple[str, float]:
    """Why one device is refused, and the largest difference between the loss of the distributed model and that of one
    device: on the first rank; an empty text and 0 on the others."""
    first = dist.get_rank() == 0
    data = library_bytes(1 << 20)
    batch = batch_at(data, 0, 1, length)
    model = stock_model(length)
    refused = refusal(model, batch, limit_bytes) if first else ""
    if first:
        print(f"on one device: {refused or 'it fits'}\n")
    dist_model = autopar.parallelize(model, mesh, batch, cluster="cpu", memory_limit=limit_bytes)
    if first:
        print(f"on {mesh.size()} devices:\n{dist_model.plan}\n")
    optimizer = torch.optim.AdamW(dist_model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(steps):
        batch = batch_at(data, step, 1, length)
        loss = dist_model.forward_backward(**batch).loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            expected = model(**batch, use_cache=False).loss
            expected.backward()
            reference.step()
            reference.zero_grad()
            worst = max(worst, abs(loss - expected.item()))
            print(f"step {step + 1}: loss {loss:.6f}, on one device {expected.item():.6f}")
    return refused, worst


def main() -> None:
    """Plan, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--limit", type=float, default=96.0, help="MiB of a device")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    _, worst = train(mesh, arguments.steps, arguments.length, arguments.limit * MIB)
    dist.destroy_process_group()
    if worst > TOLERANCE:
        raise SystemExit(f"the losses differ by {worst:.1e}")


if __name__ == "__main__":
    main()
