"""Scans over a sequence as operators: a trace of their loops has an op for each step of each place or chunk.

`delta` is linear attention by the delta rule, chunk after chunk; `selective` the selective state spaces of Mamba.
"""

from collections.abc import Callable, Mapping

import torch

from passes.scans.delta import scan_chunks
from passes.scans.selective import scan_places

# The function of each operator, whose kernel for tensors without values makes the results alone.
FUNCTIONS: Mapping[object, Callable[..., object]] = {
    torch.ops.autopar.delta_scan.default: scan_chunks,
    torch.ops.autopar.selective_scan.default: scan_places,
}
