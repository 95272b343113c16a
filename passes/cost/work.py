"""The work of a model: the seconds of its ops on one device, and its model FLOPs.

Model FLOPs are those of Chowdhery et al. 2022 (PaLM, appendix B), counted op by op: what the model computes, not what a
plan computes again.
"""

from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.cost.fusion import joined
from passes.cost.price import seconds_alone
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded
from passes.ir.program import Op, Program
from passes.ir.work import Work
from passes.rules import find_rule

# The gradients of a product are two products as large. Fused attention multiplies more: it computes its scores again.
_BACKWARD = 2.0
# dtypes of tokens.
_TOKENS = (torch.int64, torch.int32)


def seconds_by_op(folded: Folded, cluster: Cluster) -> dict[str, float]:
    """Seconds that one device computes each op, forward and backward, in all copies of its region, by key."""
    found: dict[str, float] = {}
    fused = joined(folded)
    for op, count in folded.runs:
        own = fused.get(op.results[0]) if op.results else None
        seconds = sum(seconds_alone(op, folded.types, folded.flowing, folded.program.rules, cluster, own))
        found[op.key] = found.get(op.key, 0.0) + count * seconds
    return found


def work_of(program: Program, folded: Folded, samples: int, configuration: Configuration, cluster: Cluster) -> Work:
    """The work of a step of `program` with a batch of `samples`; `folded` is the program of one of its micro-batches.

    Tokens are the elements of the input `input_ids`, or else of the first input of whole numbers with two dims.
    """
    flops = peak_s = 0.0
    for op, count in folded.runs:
        own = configuration.micro_batches * count * _flops(op, folded)
        flops += own
        if own:
            peak_s += own / cluster.device.peak(folded.types[op.operands[0]].dtype)
    whole = {
        item.name: item.type for item in program.inputs if len(item.type.shape) == 2 and item.type.dtype in _TOKENS
    }
    ids = next((type for name, type in whole.items() if name == "input_ids"), next(iter(whole.values()), None))
    devices = configuration.pipeline.ranks * configuration.mesh.size
    return Work(samples, prod(ids.shape) if ids is not None else 0, flops, peak_s, devices)


def _flops(op: Op, folded: Folded) -> float:
    """Model FLOPs of an op, forward and backward."""
    rule = find_rule(op, folded.types, folded.program.rules)
    if rule is None or not rule.multiplications:
        return 0.0
    flowing = [name in folded.flowing for name in op.operands]
    backward = sum(factor for factor, flows in zip(rule.backward, flowing, strict=False) if flows)
    return rule.multiplications * (1 + min(backward, _BACKWARD))
