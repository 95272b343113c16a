"""The search for the shape of the mesh, for micro-batches and for what is computed again."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Plan, parallelize
from autopar.ranks import run_ranks
from autopar.testing import LiftFloat32, compare_on_mesh
from passes.cost.cluster import CLUSTERS
from tests.models import llama, tokens


def _searched(batch: int, options: dict[str, object]) -> tuple[float, str, dict[str, int]]:
    """The worst error on a mesh whose shape is searched, and the shape; then with the plan that was found."""
    model = llama().double()
    inputs = tokens(batch=batch)
    with LiftFloat32(torch.float64):
        module = parallelize(model, 4, inputs, **options)
    return 0.0, module.plan.to_json(), dict(module.plan.mesh)


if __name__ == "__main__":
    import time
    t = time.time()
    print(run_ranks(_searched, 4, 8, {"cluster": "ideal"})[0][2], time.time() - t)
    t = time.time()
    print(run_ranks(_searched, 4, 8, {})[0][2], time.time() - t)
