"""Planned peaks of memory against what torch's MemTracker finds, on models from tiny to 8B.

Each plan is generated, and its module runs as one rank of a "fake" process group on tensors without values.
`--write` puts the table into docs/cost-model.md. `--long` takes long sequences on up to 512 ranks instead, which are
minutes each: a ring has a step for each rank.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import Tensor, nn

from autopar import Precision
from tests.autopar.simulated import predicted_and_measured

DOCUMENT = Path(__file__).parent.parent / "docs" / "cost-model.md"
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"
# The table in docs/cost-model.md is of gradients that are reduced in bfloat16, which is not the default.
MIXED = {"precision": Precision(compute=torch.bfloat16, reduce=torch.bfloat16, master=torch.float32)}
RING = {"@scaled_dot_product_attention": {"method": {"dp": "ring"}}}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
HEAD = "| model | batch | mesh | options | peak at | planned | measured | planned / measured |"


@dataclass(frozen=True)
class Model:
    """A stock class, its config, and a batch."""

    kind: type[nn.Module]
    config: Callable[[], object]
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Case:
    """A model on a mesh, with options of `autopar.plan`."""

    model: str
    mesh: tuple[int, ...]
    options: Mapping[str, object] = field(default_factory=dict)


def _text(batch: int, length: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"input_ids": ((batch, length), torch.long), "labels": ((batch, length), torch.long)}


def _llama(width: int, inner: int, layers: int, heads: int, vocabulary: int, tied: bool) -> Callable[[], object]:
    return lambda: transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


MODELS = {
    "llama, 8 tiny layers": Model(transformers.LlamaForCausalLM, _llama(64, 128, 8, 4, 256, tied=False), _text(8, 32)),
    "llama 1B": Model(transformers.LlamaForCausalLM, _llama(2048, 8192, 16, 32, 128256, tied=True), _text(8, 2048)),
    "llama 8B": Model(transformers.LlamaForCausalLM, _llama(4096, 14336, 32, 32, 128256, tied=False), _text(8, 4096)),
    "llama 8B, long": Model(
        transformers.LlamaForCausalLM, _llama(4096, 14336, 32, 32, 128256, tied=False), _text(1, 131072)
    ),
    "llama 8B, longer": Model(
        transformers.LlamaForCausalLM, _llama(4096, 14336, 32, 32, 128256, tied=False), _text(1, 1048576)
    ),
    "gpt2 124M": Model(transformers.GPT2LMHeadModel, transformers.GPT2Config, _text(8, 512)),
    "mixtral, tiny": Model(
        transformers.MixtralForCausalLM,
        lambda: transformers.MixtralConfig(**SMALL, num_key_value_heads=2, vocab_size=256, num_local_experts=4),
        _text(8, 32),
    ),
    "vit, tiny": Model(
        transformers.ViTForImageClassification,
        lambda: transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, hidden_dropout_prob=0.1),
        {"pixel_values": ((16, 3, 32, 32), torch.float32), "labels": ((16,), torch.long)},
    ),
    "t5, tiny": Model(
        transformers.T5ForConditionalGeneration,
        lambda: transformers.T5Config(
            d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=256, decoder_start_token_id=0
        ),
        _text(8, 32),
    ),
}

CASES = (
    Case("llama, 8 tiny layers", (1,), {"cluster": "cpu"}),
    Case("llama, 8 tiny layers", (2, 2), {"cluster": "ideal"}),
    Case("gpt2 124M", (1,), {"optimizer": "sgd"}),
    Case("gpt2 124M", (4, 2)),
    Case("mixtral, tiny", (2, 2), {"cluster": "ideal"}),
    Case("vit, tiny", (2, 2), {"cluster": "ideal"}),
    Case("t5, tiny", (2,), {"cluster": "ideal"}),
    Case("llama 1B", (2,), MIXED),
    Case("llama 1B", (2, 2)),
    Case("llama 8B", (8, 8), {"objective": "infer"}),
    Case("llama 8B", (8, 8), MIXED),
    Case("llama 8B", (4, 2), MIXED),
    Case("llama 8B, long", (8,), {**MIXED, "constraints": RING}),
)

LONG_CASES = tuple(
    Case(model, (ranks,), {**MIXED, "constraints": RING})
    for model in ("llama 8B, long", "llama 8B, longer")
    for ranks in (8, 64, 512)
)


def row(case: Case) -> str:
    """Plan and run a case: a line of the table."""
    about = MODELS[case.model]
    with torch.device("meta"):
        model = about.kind(about.config())
        inputs: dict[str, Tensor] = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in about.inputs.items()
            if name != "labels" or case.options.get("objective") != "infer"
        }
    mesh = dict(zip(("dp", "tp"), case.mesh, strict=False))
    predicted, measured, compiled = predicted_and_measured(model, mesh, inputs, **case.options)
    (program,) = compiled.plan.programs.values()
    shape = " x ".join(map(str, next(iter(about.inputs.values()))[0]))
    sizes = " x ".join(map(str, case.mesh))
    options = ", ".join(_shown(name, value) for name, value in case.options.items()) or "adamw"
    cells = (case.model, shape, sizes, options, program.peak_moment, _size(predicted), _size(measured))
    return f"| {' | '.join(cells)} | {predicted / measured:.5f} |"


def _shown(name: str, value: object) -> str:
    shown = {"precision": "bfloat16, float32 stored", "constraints": "attention by a ring"}
    return shown.get(name, f"{name} {value}")


def _size(count: int) -> str:
    return f"{count / 2**30:.3f} GiB" if count >= 2**30 else f"{count / 2**20:.3f} MiB"


def main() -> None:
    """Measure all cases and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--write", action="store_true", help="put the table into docs/cost-model.md")
    kinds.add_argument("--long", action="store_true", help="measure long sequences on many ranks")
    given = parser.parse_args()
    logging.getLogger("autopar").setLevel(logging.ERROR)
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    print("\n".join(lines), flush=True)
    for case in LONG_CASES if given.long else CASES:
        lines.append(row(case))
        print(lines[-1], flush=True)
    if given.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join([BEGIN, *lines, END])
        DOCUMENT.write_text(f"{before}{table}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
