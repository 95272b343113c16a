"""Train a stock Llama of about 10M parameters on four processes, and beside it the same run on one.

    torchrun --nproc-per-node 4 examples/train_llama.py

The text is the source code of Python's standard library, byte by byte. After every step the loss of the parallelized
model is printed beside that of the same model, batches and optimizer on one device; at the end they must agree.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

TOLERANCE = 1e-4
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=9,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
)


def library_bytes(least: int) -> torch.Tensor:
    """At least `least` bytes of the standard library's sources, as int64 [bytes]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= least:
            break
    return torch.frombuffer(text, dtype=torch.uint8).to(torch.int64)


def batch_at(data: torch.Tensor, step: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """The batch of a step: int64 [batch, length], the same on every rank; labels are the tokens themselves."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length, (batch,), generator=generator)
    tokens = torch.stack([data[start : start + length] for start in starts.tolist()])
    return {"input_ids": tokens, "labels": tokens}


def stock_model() -> LlamaForCausalLM:
    """The same model on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def main() -> None:
    """Train, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, of all devices together")
    parser.add_argument("--length", type=int, default=64, help="tokens per sample")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = library_bytes(1 << 20)

    model = stock_model()
    dist_model = autopar.parallelize(model, mesh, batch_at(data, 0, arguments.batch, arguments.length))
    optimizer = torch.optim.AdamW(dist_model.parameters(), lr=arguments.learning_rate)
    # The reference runs on the first rank alone, where it has the model as it was given to parallelize.
    reference = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate) if first else None
    if first:
        print(dist_model.plan)
        print(f"\n{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M parameters")
        print(f"generated code: {dist_model.code_path}\n")

    worst = 0.0
    for step in tqdm(range(arguments.steps), desc="training", unit="step", disable=not first):
        batch = batch_at(data, step, arguments.batch, arguments.length)
        output = dist_model.forward_backward(**batch)
        optimizer.step()
        optimizer.zero_grad()
        if reference is not None:
            expected = model(**batch, use_cache=False)
            expected.loss.backward()
            reference.step()
            reference.zero_grad()
            difference = abs(output.loss.item() - expected.loss.item())
            worst = max(worst, difference)
            tqdm.write(
                f"step {step + 1:3d}: loss {output.loss.item():.6f}, on one device {expected.loss.item():.6f}, "
                f"difference {difference:.1e}"
            )
    if first:
        verdict = "equal" if worst <= TOLERANCE else "NOT equal"
        print(f"largest difference over {arguments.steps} steps: {worst:.1e}, {verdict} to {TOLERANCE:.0e}")
    dist.destroy_process_group()
    if worst > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
