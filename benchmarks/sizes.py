"""Plans of models at the sizes that people train: `python benchmarks/sizes.py [--rows NAME,NAME] [--json]`.

Each row is a published configuration, from its model card, planned from `meta` with a searched mesh, on H100s where it
does not say otherwise. The planner decides whether there is a pipeline, unless the row has a number of stages. It says
whether the plan fits, the CPU seconds of planning (tracing included), the peak memory of the process, and of the plan
its step, gap, memory and tokens/s per device. Every row runs in a process of its own, which may take `--seconds` and
`--gib`. Needs no accelerator and no weights.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import autopar

GIB = 1024**3
CAUSAL = "{}ForCausalLM"


@dataclass(frozen=True)
class Row:
    """A published model (`kind` names its classes, `head` the class of its task), the number of devices, and the batch:
    samples, and tokens of each. `stages` is the size of a pipeline that is given, with the other devices in one axis; 0
    leaves it to the planner."""

    name: str
    kind: str
    sizes: Mapping[str, Any]
    devices: int
    batch: int
    length: int
    head: str = CAUSAL
    dtype: torch.dtype = torch.bfloat16
    cluster: str = "h100"
    outputs: str | None = None
    stages: int = 0


def _decoder(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The sizes of a decoder, by the names that most configurations have."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        **more,
    }


# Experts as one grouped product, which is how they are trained.
GROUPED = {"experts_implementation": "grouped_mm"}
_GEMMA2 = {"sliding_window": 4096}
_GEMMA3 = {"head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
_GPT_OSS = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, **GROUPED}
_DEEPSEEK_V2_LITE = {
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 1, **GROUPED,
}  # fmt: skip
_OPT = {"hidden_size": 9216, "ffn_dim": 36864, "num_hidden_layers": 64, "num_attention_heads": 72,
        "word_embed_proj_dim": 9216, "vocab_size": 50272, "max_position_embeddings": 2048, "dropout": 0.0}  # fmt: skip
_T5_11B = {"d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_layers": 24, "num_heads": 128, "vocab_size": 32128,
           "decoder_start_token_id": 0, "dropout_rate": 0.0}  # fmt: skip
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_VIT = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "patch_size": 14, "image_size": 224}  # fmt: skip
_FALCON = {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
           "new_decoder_architecture": True, "vocab_size": 65024}  # fmt: skip
_BLOOM = {"hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}
_MAMBA2 = {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "state_size": 128, "expand": 2,
           "head_dim": 64, "num_heads": 80, "n_groups": 1}  # fmt: skip
_FALCON_MAMBA = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64, "vocab_size": 65024,
                 "state_size": 16}  # fmt: skip
_QWEN3_235B = _decoder(4096, 12288, 94, 64, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                       moe_intermediate_size=1536, **GROUPED)  # fmt: skip

ROWS = (
    Row("llama-2-7b", "Llama", _decoder(4096, 11008, 32, 32, 32, 32000), 32, 128, 4096),
    Row("llama-2-70b", "Llama", _decoder(8192, 28672, 80, 64, 8, 32000), 256, 512, 4096),
    Row("llama-3.1-8b", "Llama", _decoder(4096, 14336, 32, 32, 8, 128256), 64, 128, 8192),
    Row("llama-3.1-70b", "Llama", _decoder(8192, 28672, 80, 64, 8, 128256), 512, 512, 8192),
    Row("llama-3.1-405b", "Llama", _decoder(16384, 53248, 126, 128, 8, 128256), 16384, 2048, 8192),
    Row("qwen2.5-7b", "Qwen2", _decoder(3584, 18944, 28, 28, 4, 152064), 32, 128, 4096),
    Row("qwen2.5-72b", "Qwen2", _decoder(8192, 29568, 80, 64, 8, 152064), 256, 512, 4096),
    Row("qwen3-8b", "Qwen3", _decoder(4096, 12288, 36, 32, 8, 151936, head_dim=128), 64, 256, 4096),
    Row("qwen3-32b", "Qwen3", _decoder(5120, 25600, 64, 64, 8, 151936, head_dim=128), 128, 256, 8192),
    Row("mistral-7b", "Mistral", _decoder(4096, 14336, 32, 32, 8, 32768, sliding_window=None), 16, 64, 8192),
    Row("mistral-small-24b", "Mistral",
        _decoder(5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None), 64, 128, 8192),
    Row("mixtral-8x7b", "Mixtral",
        _decoder(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, **GROUPED), 64, 256, 4096),
    Row("gemma-2-9b", "Gemma2",
        _decoder(3584, 14336, 42, 16, 8, 256000, head_dim=256, query_pre_attn_scalar=256, **_GEMMA2), 64, 128, 8192),
    Row("gemma-2-27b", "Gemma2",
        _decoder(4608, 36864, 46, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144, **_GEMMA2), 128, 256, 8192),
    Row("gemma-3-27b", "Gemma3", _decoder(5376, 21504, 62, 32, 16, 262208, **_GEMMA3), 64, 64, 8192),
    Row("phi-3-mini", "Phi3", _decoder(3072, 8192, 32, 32, 32, 32064), 16, 128, 4096),
    Row("phi-4", "Phi3", _decoder(5120, 17920, 40, 40, 10, 100352), 64, 256, 4096),
    Row("gpt-oss-20b", "GptOss", _decoder(2880, 2880, 24, 64, 8, 201088, **_GPT_OSS), 64, 256, 4096),
    Row("falcon-40b", "Falcon", _FALCON, 128, 512, 2048),
    Row("bloom-176b", "Bloom", _BLOOM, 384, 2304, 2048),
    Row("bloom-176b-a100", "Bloom", _BLOOM, 384, 2048, 2048, cluster="a100", outputs="scalars"),
    Row("llama-3.1-70b-pp8", "Llama", _decoder(8192, 28672, 80, 64, 8, 128256), 512, 512, 8192, stages=8),
    Row("opt-66b", "OPT", _OPT, 256, 1024, 2048),
    Row("gpt-neox-20b", "GPTNeoX", _decoder(6144, 24576, 44, 64, 64, 50432), 96, 1536, 2048),
    Row("olmo-2-7b", "Olmo2", _decoder(4096, 11008, 32, 32, 32, 100352), 64, 256, 4096),
    Row("olmo-2-32b", "Olmo2", _decoder(5120, 27648, 64, 40, 8, 100352), 128, 512, 4096),
    Row("deepseek-v2-lite", "DeepseekV2", _decoder(2048, 10944, 27, 16, 16, 102400, **_DEEPSEEK_V2_LITE), 64, 256,
        4096),
    Row("deepseek-v3", "DeepseekV3", GROUPED, 2048, 2048, 4096),
    Row("mamba2-2.7b", "Mamba2", _MAMBA2, 64, 64, 2048),
    Row("falcon-mamba-7b", "FalconMamba", _FALCON_MAMBA, 64, 256, 4096),
    Row("jamba-52b", "Jamba",
        _decoder(4096, 14336, 32, 32, 8, 65536, num_experts=16, num_experts_per_tok=2, **GROUPED), 64, 64, 4096),
    Row("qwen3-next-80b", "Qwen3Next", GROUPED, 256, 512, 4096),
    Row("qwen3-235b", "Qwen3Moe", _QWEN3_235B, 512, 512, 4096),
    Row("granite-3.1-8b", "Granite", _decoder(4096, 12800, 40, 32, 8, 49152), 64, 256, 4096),
    Row("starcoder2-15b", "Starcoder2", _decoder(6144, 24576, 40, 48, 4, 49152, sliding_window=None), 64, 256, 4096),
    Row("command-r-35b", "Cohere", _decoder(8192, 22528, 40, 64, 64, 256000), 128, 256, 4096),
    Row("t5-11b", "T5", _T5_11B, 64, 2048, 512, "{}ForConditionalGeneration"),
    Row("bert-large", "Bert", _BERT, 8, 1024, 512, "{}ForMaskedLM"),
    Row("vit-huge", "ViT", _VIT, 16, 4096, 0, "{}ForImageClassification"),
)  # fmt: skip


def model_of(row: Row) -> torch.nn.Module:
    """The stock model of a row, without values."""
    text = "Text" if row.kind == "Gemma3" else ""
    config = getattr(transformers, f"{row.kind}{text}Config")(**row.sizes)
    if "experts_implementation" in row.sizes:
        config._experts_implementation = row.sizes["experts_implementation"]
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, row.head.format(row.kind))(config).to(row.dtype)
    return model


def batch_of(row: Row) -> dict[str, object]:
    """The global batch of a row."""
    if not row.length:
        pixels = torch.empty(row.batch, 3, 224, 224, dtype=row.dtype, device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(row.batch, dtype=torch.long, device="meta")}
    ids = torch.empty(row.batch, row.length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def measure(row: Row) -> dict[str, object]:
    """Plan a row in this process."""
    start, cpu = time.perf_counter(), time.process_time()
    found: dict[str, object]
    try:
        mesh = {"pp": row.stages, "inner": row.devices // row.stages} if row.stages else row.devices
        plan = autopar.plan(model_of(row), mesh, batch_of(row), cluster=row.cluster, outputs=row.outputs)
    except (autopar.AutoparError, MemoryError) as error:
        found = {"fits": False, "error": f"{type(error).__name__}: {error}"}
    else:
        program = plan.programs["train"]
        found = {
            "fits": True,
            "mesh": dict(plan.mesh),
            "micro_batches": program.micro_batches,
            "step_s": program.step_s,
            "memory_gib": sum(program.memory.values()) / GIB,
            "gap": program.gap,
            "tokens_per_second_per_device": program.tokens_per_second_per_device,
            "samples_per_second_per_device": program.samples_per_second_per_device,
            "mfu": program.mfu,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return {**found, **seconds, "peak_gib": peak}


def apart(row: Row, seconds: float, gib: float) -> dict[str, object]:
    """`measure` in a process of its own, with a limit of time and of memory."""
    head: dict[str, object] = {
        "model": row.name,
        "devices": row.devices,
        "batch": f"{row.batch} x {row.length}" if row.length else str(row.batch),
        "dtype": str(row.dtype).removeprefix("torch."),
    }
    size = int(gib * GIB)
    try:
        run = subprocess.run(
            [sys.executable, __file__, "--measure", row.name],
            capture_output=True,
            timeout=seconds,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (size, size)),
        )
    except subprocess.TimeoutExpired:
        return {**head, "fits": None, "error": f"more than {seconds:.0f} s"}
    if run.returncode:
        said = run.stderr.strip().splitlines()
        return {**head, "fits": None, "error": said[-1] if said else f"it ended with {run.returncode}"}
    return {**head, **json.loads(run.stdout.splitlines()[-1])}


def line(found: Mapping[str, Any]) -> str:
    """A row as a line of a table."""
    head = f"| {found['model']} | {found['devices']:,} | {found['batch']} | {found['dtype']} "
    spent = f"| {found['cpu_seconds']:.0f} s | {found['peak_gib']:.1f} GiB " if "cpu_seconds" in found else "| | "
    if not found["fits"]:
        return f"{head}| {'no' if found['fits'] is False else '?'} {spent}| {found['error'].splitlines()[0]} | | | | |"
    rate = f"{found['tokens_per_second_per_device']:,.0f} tokens"
    if not found["tokens_per_second_per_device"]:
        rate = f"{found['samples_per_second_per_device']:,.0f} samples"
    axes = " x ".join(f"pp {size}" if name == "pp" else str(size) for name, size in found["mesh"].items())
    step, memory = f"{found['step_s']:.3g} s", f"{found['memory_gib']:.1f} GiB"
    how = f"{axes}, {found['micro_batches']}"
    return f"{head}| yes {spent}| {how} | {step} | {memory} | {found['gap']:.2%} | {rate}, {found['mfu']:.0%} |"


TITLES = (
    "model", "devices", "batch", "dtype", "fits", "planning", "resident", "mesh, micro-batches", "step", "memory",
    "gap", "per second and device, MFU",
)  # fmt: skip


def main() -> None:
    """Measure the rows and print a line of each, or their data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", help="names, or parts of names, with commas between them")
    parser.add_argument("--json", action="store_true", help="print data")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of time of a row")
    parser.add_argument("--gib", type=float, default=8.0, help="limit of memory of a row")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        logging.getLogger("autopar").setLevel(logging.ERROR)
        print(json.dumps(measure(next(row for row in ROWS if row.name == given.measure))))
        return
    parts = given.rows.split(",") if given.rows else [""]
    rows = [row for row in ROWS if any(part in row.name for part in parts)]
    found = []
    if not given.json:
        print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for row in rows:
        found.append(apart(row, given.seconds, given.gib))
        if not given.json:
            print(line(found[-1]), flush=True)
    if given.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
