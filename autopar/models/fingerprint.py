"""Fingerprints of models: of their structure, to compare with plans, and of their values, to compare between ranks."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn


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


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
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
