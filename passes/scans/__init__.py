"""Scans over a sequence as operators: a trace of their loops has an op for each step of each place or chunk.

`delta` is linear attention by the delta rule, chunk after chunk; `selective` the selective state spaces of Mamba.
"""

from collections.abc import Callable, Mapping

import torch

from passes._torch import OpOverload
from passes.scans.delta import scan_chunks
from passes.scans.selective import scan_places

# The function that each operator runs. For tensors without values an operator makes its results alone, where the
# function makes its temporaries, too.
SCANS: Mapping[OpOverload, Callable[..., object]] = {
    torch.ops.autopar.delta_scan.default: scan_chunks,
    torch.ops.autopar.selective_scan.default: scan_places,
}
