"""A mesh that is searched is never worse than a shape of up to four axes that is given."""

import os
import random
from collections.abc import Iterator, Sequence
from datetime import date

import pytest

from passes.cost.cluster import CLUSTERS
from tests.autopar.relations import Case, Model, clean_traces, outcome, violation

# Shapes of other cases than `WHOLE`, which has all.
_DRAWN = 12
_AXES = 4


def _decoder(architecture: str, layers: int, batch: int, length: int, **sizes: int) -> Model:
    return Model(architecture, tuple({"num_hidden_layers": layers, **sizes}.items()), batch, length)


def _widths(hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, head_dim: int = 128) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "head_dim": head_dim,
            "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": 8192}  # fmt: skip


_LLAMA_8B = _widths(4096, 14336, 32, 8, 128256)
_LLAMA_70B = _widths(8192, 28672, 64, 8, 128256)
_QWEN_8B = _widths(4096, 12288, 32, 8, 151936)
_QWEN_32B = _widths(5120, 25600, 64, 8, 151936)
_MISTRAL = {**_widths(4096, 14336, 32, 8, 32768), "sliding_window": 4096}
_GEMMA = {**_widths(3584, 14336, 16, 8, 256000, 256), "sliding_window": 4096}

WHOLE = {
    "llama-8b": _decoder("llama", 32, 128, 8192, **_LLAMA_8B),
    "llama-70b": _decoder("llama", 80, 64, 8192, **_LLAMA_70B),
    "gpt2-xl": Model("gpt2", (("n_embd", 1600), ("n_layer", 48), ("n_head", 25), ("vocab_size", 50257),
                              ("n_positions", 1024)), 512, 1024),
}  # fmt: skip

# Architecture, layers, sizes, and (devices, batch, length) three times.
_PUBLISHED = {
    "llama-8b": ("llama", 32, _LLAMA_8B, ((64, 32, 8192), (128, 256, 4096), (96, 192, 8192))),
    "llama-70b": ("llama", 80, _LLAMA_70B, ((64, 128, 4096), (128, 64, 32768), (512, 512, 8192))),
    "qwen3-8b": ("qwen3", 36, _QWEN_8B, ((16, 8, 32768), (64, 64, 4096), (256, 1024, 4096))),
    "qwen3-32b": ("qwen3", 64, _QWEN_32B, ((64, 64, 8192), (128, 32, 32768), (96, 96, 4096))),
    "mistral-7b": ("mistral", 32, _MISTRAL, ((16, 64, 8192), (64, 8, 8192), (128, 512, 2048))),
    "gemma2-9b": ("gemma2", 42, _GEMMA, ((64, 64, 4096), (32, 16, 8192), (128, 256, 8192))),
    "llama-1b": ("llama", 16, _widths(2048, 8192, 32, 8, 128256, 64), ((8, 64, 8192), (64, 4, 8192), (32, 1, 131072))),
    "llama-405b": ("llama", 126, _widths(16384, 53248, 128, 8, 128256), ((512, 64, 8192), (1024, 256, 8192),
                   (2048, 512, 8192))),
}  # fmt: skip


def _factorings(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All shapes of up to so many axes of several devices each."""
    yield (devices,)
    for first in range(2, devices):
        if axes > 1 and devices % first == 0:
            yield from ((first, *rest) for rest in _factorings(devices // first, axes - 1))


def _slower(model: Model, devices: int, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """The shapes that are better than the searched mesh."""
    searched = Case(model, devices, CLUSTERS["h100"], CLUSTERS["h100"].usable_memory)
    found = []
    with clean_traces():
        best = outcome(searched)
        for sizes in shapes:
            mesh = {f"axis{number}": size for number, size in enumerate(sizes)}
            given = outcome(Case(model, mesh, searched.cluster, searched.memory_limit))
            broken = violation(given, best)
            if broken:
                found.append(f"{sizes}: {broken}\n  {given}\n  {best}")
    return found


def test_shapes_are_all() -> None:
    """64 devices have 26 shapes of up to four axes."""
    assert len(set(_factorings(64, _AXES))) == 26


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_searched_is_not_worse_than_any_shape(name: str) -> None:
    """On 64 devices, for all shapes."""
    broken = _slower(WHOLE[name], 64, list(_factorings(64, _AXES)))
    assert not broken, "\n".join(broken)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", _PUBLISHED)
def test_searched_is_not_worse_than_drawn_shapes(name: str, place: int) -> None:
    """For shapes drawn from a seed, which AUTOPAR_SEED sets and else the day."""
    architecture, layers, sizes, runs = _PUBLISHED[name]
    devices, batch, length = runs[place]
    seed = int(os.environ.get("AUTOPAR_SEED", date.today().toordinal()))
    every = list(_factorings(devices, _AXES))
    shapes = random.Random(f"{seed} {name} {place}").sample(every, min(_DRAWN, len(every)))
    print(f"AUTOPAR_SEED={seed}: {shapes}")
    broken = _slower(_decoder(architecture, layers, batch, length, **sizes), devices, shapes)
    assert not broken, f"AUTOPAR_SEED={seed}\n" + "\n".join(broken)
