"""Fingerprints of models: of their structure, to compare with plans, and of their values, to compare between ranks."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from passes.ir.errors import PlanMismatchError


def structure_fingerprint(model: nn.Module) -> str:
    """Equal for models of the same structure: class, submodules, parameters and buffers with ties, configuration."""
    lines = [f"{type(model).__module__}.{type(model).__qualname__}", repr(model)]
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        lines += [f"{name}={value!r}" for name, value in sorted(_settings(config.to_dict()))]
    lines += _tensor_lines("parameter", model.named_parameters(remove_duplicate=False))
    lines += _tensor_lines("buffer", model.named_buffers(remove_duplicate=False))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def values_fingerprint(model: nn.Module) -> dict[str, str]:
    """For every parameter and buffer a text that is equal for equal values."""
    found = {}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                continue
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
            if not flat.numel():
                continue
            # The hash is an exclusive or, which equal values cancel out of: look at some of them too.
            hashes = [torch.hash_tensor(part).item() for part in (flat, flat[::2], flat[::3])]
            found[name] = f"{hashes} {flat[:1].tolist()}"
    return found


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of a model on one rank: of its structure, its loss, and every value by name."""

    structure: str
    loss: str
    values: Mapping[str, str]


def refuse_different_models(ranks: Sequence[Fingerprint]) -> None:
    """Raise PlanMismatchError if the ranks of a mesh, in its order, hold different models."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if other.structure != first.structure:
            raise PlanMismatchError(
                f"ranks hold different models: the one of rank {rank} of the mesh has a different structure from "
                "rank 0's"
            )
        if other.loss != first.loss:
            raise PlanMismatchError(
                f"ranks pass different losses: the code of the one on rank {rank} of the mesh, or a value that it "
                "holds, is not that of rank 0"
            )
        name = _first_difference(first.values, other.values)
        if name is not None:
            raise PlanMismatchError(
                f"ranks hold different models: {name!r} has other values on rank {rank} of the mesh than on rank 0; "
                "make the model from the same seed or the same checkpoint on every rank"
            )


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first name that two fingerprints of values differ in."""
    for name in one:
        if one[name] != other.get(name):
            return name
    return next((name for name in other if name not in one), None)


def _settings(config: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """A configuration without what changes from version to version or run to run."""
    return ((name, value) for name, value in config.items() if name not in ("transformers_version", "_name_or_path"))


def _tensor_lines(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    first: dict[int, str] = {}
    return [
        f"{kind} {name} {first.setdefault(id(tensor), name)} "
        f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for name, tensor in named
    ]
