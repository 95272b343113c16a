"""Stock architectures on gloo ranks equal themselves on one device: outputs, loss and every gradient."""

import fnmatch

import pytest
import torch

from autopar.testing import LiftFloat32, RankError, compare
from tests.architectures import ARCHITECTURES
from tests.architectures.architecture import Architecture
from tests.autopar.comparing import MESHES, TOLERANCE, marked

SAMPLES = 4
REQUIRED = [name for name, one in ARCHITECTURES.items() if not one.extra]
EXTRA = [name for name, one in ARCHITECTURES.items() if one.extra]
# A decoder and an encoder: all are tested at night.
FAST = {"falcon-multi-query-alibi", "bert"}


def hold(one: Architecture, mesh: str, objective: str) -> None:
    """Compare, and hold against the tolerance of the architecture's dtype; what is refused must be, with its reason."""
    if objective in one.refused:
        with pytest.raises(RankError, match=f"cannot trace .*: {one.refused[objective]}; what can be traced can"):
            compare(one.make(), MESHES[mesh], one.inputs(SAMPLES), one.dtype, objective=objective, cluster="ideal")
        return
    comparison = compare(one.make(), MESHES[mesh], one.inputs(SAMPLES), one.dtype, objective=objective, cluster="ideal")
    allowed = TOLERANCE if one.dtype == torch.float64 else 1e-4
    assert comparison.worst[1] <= allowed, str(comparison)


@pytest.mark.parametrize("name", marked(ARCHITECTURES, REQUIRED))
def test_all_parameters_have_part_in_the_loss(name):
    """The table itself: what is compared is not nothing, and not random."""
    one = ARCHITECTURES[name]
    model = one.make().to(one.dtype)
    inputs = {
        name: leaf.to(one.dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for name, leaf in one.inputs(SAMPLES).items()
    }
    with LiftFloat32(one.dtype):
        loss, again = (model(**inputs)["loss"] for _ in range(2))
    assert torch.isfinite(loss)
    assert loss == again
    loss.backward()
    without = {name for name, item in model.named_parameters() if item.requires_grad and item.grad is None}
    assert without == {name for name in without if any(fnmatch.fnmatch(name, pattern) for pattern in one.unused)}


@pytest.mark.long
@pytest.mark.parametrize("name", marked(REQUIRED, FAST))
def test_training(name):
    hold(ARCHITECTURES[name], "2x2", "train")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "objective"), [("4", "train"), ("2x2", "infer"), ("4", "infer")])
@pytest.mark.parametrize("name", REQUIRED)
def test_other_meshes_and_inference(name, mesh, objective):
    hold(ARCHITECTURES[name], mesh, objective)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "objective"), [("2x2", "train"), ("4", "train"), ("2x2", "infer")])
@pytest.mark.parametrize("name", EXTRA)
def test_extra(name, mesh, objective):
    hold(ARCHITECTURES[name], mesh, objective)


# The loss of these is not shown to be a sum over samples: contrastive, or of patches of all images in one row.
NOT_IN_PARTS = {"clip", "siglip", "qwen2_5_vl-vision", "qwen3_vl-vision"}
# It returns the features of each image.
SCALARS = {"llava"}
IN_PLACES = ("internvl", "paligemma", "vipllava", "aya_vision", "gemma3", "instructblip")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in REQUIRED if not ARCHITECTURES[name].refused), *IN_PLACES])
def test_in_two_stages(name):
    """Stages and micro-batches as the planner chooses them; what cannot be cut into micro-batches is refused."""
    one = ARCHITECTURES[name]

    def compared(**options):
        options |= {"outputs": "scalars"} if name in SCALARS else {}
        return compare(one.make(), {"pp": 2}, one.inputs(SAMPLES), one.dtype, cluster="ideal", **options)

    if name in NOT_IN_PARTS:
        with pytest.raises(RankError, match="the batch cannot be cut into 2 micro-batches"):
            compared(micro_batches=2)
    comparison = compared(micro_batches=1 if name in NOT_IN_PARTS else 2)
    assert comparison.worst[1] <= (TOLERANCE if one.dtype == torch.float64 else 1e-4), str(comparison)
