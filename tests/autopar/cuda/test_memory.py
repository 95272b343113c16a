"""The peak of a step as planned against what the allocator of a CUDA device has counted."""

from collections.abc import Mapping
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Precision
from autopar.testing import run_ranks
from tests.models import llama, tokens

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
MIXED = Precision(compute=torch.bfloat16, reduce=torch.float32, master=torch.float32)


def _peaks(mesh: Mapping[str, int], options: Mapping[str, object]) -> tuple[float, int]:
    """Bytes as planned, and in the third step as the allocator of this rank says."""
    devices = init_device_mesh("cuda", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    batch = {name: tensor.cuda() for name, tensor in tokens(4, 2048, 32000).items()}
    dtype = torch.float32 if "precision" in options else torch.bfloat16
    with torch.device("meta"):
        model = llama(**SIZES).to(dtype)
    module = autopar.parallelize(model, devices, batch, cluster="h100", optimizer="adamw", **options)
    module.init_weights()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, foreach=True)
    in_parts = module.plan.programs["train"].micro_batches > 1

    def step() -> None:
        # Plans count outputs until the step ends.
        outputs = (module.forward_backward if in_parts else module)(**batch)
        if not in_parts:
            outputs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    # Buffers of cuBLAS are no tensors of the program.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    workspaces = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    predicted = sum(module.plan.programs["train"].memory.values())
    return predicted, torch.cuda.max_memory_allocated() - (after - workspaces)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 1}, {}),
        ({"dp": 1}, {"recompute": "full"}),
        ({"dp": 1}, {"recompute": "selective", "precision": MIXED}),
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2}, {"zero": 3, "precision": MIXED, "micro_batches": 2}),
        ({"dp": 2}, {"zero": 1, "micro_batches": 2}),
        ({"tp": 2}, {"constraints": {"*.q_proj.weight": {"stored": {"tp": "S(0)"}}}}),
        ({"dp": 2, "tp": 2}, {}),
    ],
)
def test_peaks(mesh: dict[str, int], options: dict[str, object]) -> None:
    """Within 3 %."""
    for predicted, measured in run_ranks(_peaks, prod(mesh.values()), mesh, options, device_type="cuda"):
        print(f"peak on {mesh}, {options}: {predicted / 2**20:.1f} MiB planned, {measured / 2**20:.1f} MiB allocated")
        assert predicted == pytest.approx(measured, rel=0.03)
