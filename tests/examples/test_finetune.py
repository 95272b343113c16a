"""The training script computes what one device computes, resumes where it was, and writes a stock model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

from autopar.testing import LiftFloat32, run_ranks
from examples import finetune
from examples.finetune import Settings, groups_of, held_out_loader, learning_rate, training_loader
from tests.autopar.traces import traced_once


def _on_ranks(folder: Path, sizes: tuple[int, int]) -> tuple[float, float]:
    """The perplexity after two epochs in one run, and after two runs of one epoch each."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    settings = Settings(folder / "once", dtype=torch.float64)
    with LiftFloat32(torch.float64), traced_once():
        once = finetune.finetune(settings, mesh)
        again = replace(settings, folder=folder / "twice")
        finetune.finetune(replace(again, epochs=1), mesh)
        return once, finetune.finetune(again, mesh)


def _tuned(folder: Path) -> dict[str, torch.Tensor]:
    return dict(LlamaForCausalLM.from_pretrained(folder / "tuned", dtype=torch.float64).state_dict())


def _on_one_device(settings: Settings) -> tuple[dict[str, torch.Tensor], float]:
    """Parameters after the same steps without a mesh, and the perplexity."""
    model = LlamaForCausalLM.from_pretrained(settings.folder / "start", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    for epoch in range(settings.epochs):
        loaders = [training_loader(settings, rank, 2) for rank in range(2)]
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for group in groups_of(zip(*loaders, strict=True), settings.accumulate):
            for parts in group:
                batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                (model(**batch, use_cache=False).loss / len(group)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.largest_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    rows = torch.cat([batch["input_ids"] for batch in held_out_loader(settings, 0, 1)])
    with torch.no_grad():
        return dict(model.state_dict()), math.exp(model(input_ids=rows, labels=rows).loss.item())


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_training_resuming_and_exporting(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Accumulated, clipped and scheduled steps equal those of one device; a resumed run ends with the same parameters,
    bit for bit, as one that was not interrupted; `from_pretrained` loads the exported folder."""
    found = run_ranks(_on_ranks, sizes[0] * sizes[1], tmp_path, sizes)
    once, twice = _tuned(tmp_path / "once"), _tuned(tmp_path / "twice")
    assert all(torch.equal(once[name], twice[name]) for name in once)
    with LiftFloat32(torch.float64):
        expected, perplexity = _on_one_device(Settings(tmp_path / "once", dtype=torch.float64))
    assert set(once) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(once[name], value, rtol=1e-9, atol=1e-12)
    assert found == [(found[0][0], found[0][0])] * len(found)
    assert abs(found[0][0] - perplexity) <= 1e-9 * perplexity
