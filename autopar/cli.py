"""The command `autopar`."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from autopar.profile import QUICK, profile
from passes.cost.cluster import GIB, Cluster
from passes.ir.errors import AutoparError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `autopar ARGUMENTS`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="autopar", description="Parallelizes PyTorch models by itself.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "profile",
        help="measure this machine and write a cluster file",
        description="Measures matrix products, memory and, under torchrun, collectives on the machine at hand, and "
        "writes a cluster file: plan with cluster='FILE'.",
    )
    command.add_argument("--output", metavar="FILE", default="cluster.json", help="the file to write (cluster.json)")
    command.add_argument("--device", choices=("cuda", "cpu"), help="the device (cuda, where there is one)")
    command.add_argument("--quick", action="store_true", help="small and short measurements, less exact")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        cluster = profile(given.output, given.device, QUICK if given.quick else None)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(_shown(cluster, given.output))
    return 0


def _shown(cluster: Cluster, output: str) -> str:
    device = cluster.device
    rates = ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in device.flops.items())
    return "\n".join(
        [
            f"{cluster.name}, {cluster.node_size} in a node, written to {output}",
            f"  products    {rates} TFLOP/s",
            f"  attention   {100 * device.attention:.3g}% of that",
            f"  memory      {device.memory / GIB:.4g} GiB at {device.stream / 1e9:.4g} GB/s",
            f"  a kernel    {device.launch * 1e6:.3g} us",
            f"  inside      {cluster.inside.bandwidth / 1e9:.4g} GB/s, {cluster.inside.latency * 1e6:.3g} us a hop",
            f"  between     {cluster.between.bandwidth / 1e9:.4g} GB/s, {cluster.between.latency * 1e6:.3g} us a hop",
        ]
    )
