"""Published runs: a JSON list of records in, plain data out."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import Dimensions
from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.software import Knowledge, Software, as_known, find_row, find_software


@dataclass(frozen=True)
class Parallel:
    """The parallelism of a run: sizes of the mesh axes, and placement of states.

    `zero` is the stage (0 to 3), `shards` over how many devices of the data axis the states are split; `chunks` is the
    number of virtual stages that a device has.
    """

    tensor: int
    pipeline: int
    context: int
    data: int
    zero: int
    shards: int
    chunks: int
    schedule: str
    sequence_parallel: bool
    context_method: str

    @property
    def devices(self) -> int:
        """The number of devices of all axes."""
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True)
class Measured:
    """Published measurements: seconds, tokens/s and FLOP/s of one device, and bytes."""

    step_time: float | None
    tokens_per_second: float | None
    flops_per_second: float | None
    convention: str | None
    memory: float | None
    memory_kind: str


@dataclass(frozen=True)
class Run:
    """One record that can be replayed: `micro_batches` is how many micro-batches one device runs in a step, `repeats`
    how many steps have the tokens of one of the record, whose samples are shorter than its sequences."""

    id: str
    group: str
    dimensions: Dimensions
    device: str
    devices: int
    interconnect: str
    parallel: Parallel
    micro_batch: int
    micro_batches: int
    global_batch: int
    recompute: str
    precision: str
    frozen: bool
    quantized: bool
    repeats: int
    measured: Measured
    software: Software
    parameters: int | None
    notes: str

    @property
    def tokens(self) -> int:
        """Tokens of a step of the record."""
        return self.repeats * self.global_batch * self.dimensions.sequence


# Larger sizes are none, nor are larger or smaller figures.
LARGEST, MOST, LEAST = 1 << 26, 1 << 40, 1e-9
# How many more or less parts than wanted are looked at.
_FAR = 1000
# Published precisions: what stands first in the text decides.
_HALF = re.compile(r"^(amp_)?(bf16|fp16|bfloat16|float16)", re.IGNORECASE)
_GIB, _GB = 1024.0**3, 1e9


class RecordsError(ValueError):
    """Raised for a file that holds no records."""


def read_records(path: Path) -> list[Mapping[str, object]]:
    """The records of a file; what is no object in its list counts as a record without fields.

    Raises RecordsError where there is no JSON list.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, list):
        raise RecordsError(f"{path} must hold a JSON list of records, but holds a {type(found).__name__}")
    return [item if isinstance(item, dict) else {} for item in found]


def identity(record: Mapping[str, object], number: int) -> str:
    """The id of a record, or its place in the file."""
    return str(record.get("id") or f"record {number}")


def read_run(record: Mapping[str, object], name: str, knowledge: Knowledge = Knowledge.ALL) -> Run:
    """One record as a run, whose software is told as far as `knowledge` goes.

    Raises SkippedError where it cannot be replayed.
    """
    model, hardware, parallel = (_mapping(record, key) for key in ("model", "hardware", "parallel"))
    measured = _measured(record)
    if str(record.get("tier")) == "C" or measured.memory_kind.startswith("formula"):
        raise SkippedError(Reason.FORMULA)
    if measured.step_time is measured.tokens_per_second is measured.flops_per_second is measured.memory is None:
        raise SkippedError(Reason.NOT_MEASURED)
    precision = str(record.get("precision") or "bf16")
    if not _HALF.match(precision):
        raise SkippedError(Reason.PRECISION, precision)
    software = find_software(str(record.get("source") or ""), precision, _text(record, "notes"))
    row = find_row(software, _text(record, "cumulative_step"))
    asked = record.get("compile")
    if isinstance(asked, bool):
        row = replace(row, compiled=asked)
    software = as_known(row, knowledge, asked is True or (bool(row.sample) and row.compiled))
    dimensions = _dimensions(model)
    task = f"{record.get('task')} {name}".lower()
    if "lora" in task and "qlora" not in task:
        raise SkippedError(Reason.ADAPTERS)
    if "sft" in task.split():
        raise SkippedError(Reason.PACKED)
    devices = _number(hardware, "count", Reason.MALFORMED)
    split = _parallel(record, parallel, devices, software)
    micro_batch, global_batch = (
        _number(record, "micro_batch", Reason.PLAN),
        _number(record, "global_batch", Reason.PLAN),
    )
    micro_batches = max(1, round(global_batch / (micro_batch * split.data)))
    repeats = 1
    if software.sample and (parts := _parts(dimensions.sequence, software.sample)) > 1:
        dimensions = replace(dimensions, sequence=dimensions.sequence // parts)
        if software.packed:
            micro_batch, global_batch = micro_batch * parts, global_batch * parts
        else:
            repeats = parts
    return Run(
        name,
        str(record.get("group") or "all"),
        dimensions,
        str(hardware.get("gpu") or ""),
        devices,
        str(hardware.get("interconnect") or ""),
        split,
        micro_batch,
        micro_batches,
        global_batch,
        _recompute(record, software),
        precision,
        "qlora" in task,
        "qlora" in task,
        repeats,
        measured,
        software,
        _number(model, "params", Reason.DIMENSIONS) if model.get("params") else None,
        _text(record, "notes"),
    )


def _parts(sequence: int, sample: int) -> int:
    """In how many equal samples of about `sample` tokens a sequence is."""
    wanted = max(1, round(sequence / sample))
    near = (number for away in range(min(wanted, _FAR)) for number in (wanted - away, wanted + away))
    return next((number for number in near if sequence % number == 0), 1)


def _mapping(record: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = record.get(key)
    if not isinstance(value, Mapping):
        raise SkippedError(Reason.MALFORMED, f"no {key}")
    return value


def _text(record: Mapping[str, object], key: str) -> str:
    return str(record.get(key) or "")


def _number(record: Mapping[str, object], key: str, missing: Reason, default: int | None = None) -> int:
    """A whole number above zero: a size, or how many parameters there are."""
    most = MOST if key == "params" else LARGEST
    value = record.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise SkippedError(missing, f"no {key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < most or value != int(value):
        raise SkippedError(Reason.MALFORMED, f"{key} is {value!r}")
    return int(value)


def _figure(record: Mapping[str, object], key: str) -> float | None:
    """A measured figure, None where there is none."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value < MOST:
        raise SkippedError(Reason.MALFORMED, f"{key} is {value!r}")
    return float(value)


def _measured(record: Mapping[str, object]) -> Measured:
    """Memory in bytes: figures whose kind says GB are decimal, others binary, as their sources print them."""
    kind = _text(record, "mem_kind")
    memory = _figure(record, "peak_mem_gib")
    flops = _figure(record, "tflops_per_gpu")
    return Measured(
        _figure(record, "iter_time_s"),
        _figure(record, "tokens_per_s_per_gpu"),
        flops * 1e12 if flops is not None else None,
        _text(record, "flops_convention") or None,
        memory * (_GB if kind.startswith("GB") else _GIB) if memory is not None else None,
        kind,
    )


def _dimensions(model: Mapping[str, object]) -> Dimensions:
    def size(key: str, default: int | None = None) -> int:
        return _number(model, key, Reason.DIMENSIONS, default)

    if model.get("moe_experts"):
        raise SkippedError(Reason.EXPERTS)
    heads = size("heads")
    # Where a source leaves the vocabulary out it is GPT-2's, padded as Megatron pads it.
    return Dimensions(
        str(model.get("name") or ""),
        size("layers"),
        size("hidden"),
        heads,
        size("kv_heads", heads),
        size("head_dim", size("hidden") // heads),
        size("ffn"),
        size("vocab", 50304),
        size("seq"),
        None if model.get("tied_embeddings") is None else bool(model["tied_embeddings"]),
    )


_STAGE = re.compile(r"zero\D{0,3}(\d)", re.IGNORECASE)
_OVER = re.compile(r"(?:over|x)\s*(\d+)")


def _parallel(
    record: Mapping[str, object], parallel: Mapping[str, object], devices: int, software: Software
) -> Parallel:
    def size(key: str) -> int:
        return _number(parallel, key, Reason.PLAN, 1)

    tensor, pipeline, context = size("tp"), size("pp"), size("cp")
    rest = devices / (tensor * pipeline * context)
    data = _number(parallel, "dp", Reason.PLAN, int(rest) if rest >= 1 else 1)
    if tensor * pipeline * context * data != devices:
        raise SkippedError(Reason.INCONSISTENT, f"{tensor} x {pipeline} x {context} x {data} is not {devices}")
    zero, shards = _zero(parallel.get("zero"), data * context)
    given = record.get("sequence_parallel")
    recompute = _text(record, "recompute").lower()
    sequence = bool(given) if given is not None else software.sequence_parallel and "no sp" not in recompute
    schedule = _text(record, "schedule") or "1F1B"
    layers = _number(_mapping(record, "model"), "layers", Reason.DIMENSIONS)
    chunks = _chunks(parallel.get("vpp"), layers, pipeline) if pipeline > 1 else 1
    return Parallel(
        tensor,
        pipeline,
        context,
        data,
        zero,
        shards,
        chunks,
        schedule,
        sequence and tensor > 1,
        _text(record, "cp_comm") or "all-gather",
    )


def _chunks(given: object, layers: int, pipeline: int) -> int:
    """Virtual stages: a number, or text such as "1 layer/chunk"."""
    text = str(given or 1)
    found = re.match(r"\d+", text)
    number = max(1, int(found.group())) if found else 1
    return max(1, -(-layers // pipeline) // number) if "layer" in text else number


def _zero(given: object, copies: int) -> tuple[int, int]:
    """The stage, and over how many devices states are split."""
    if given is None:
        return 0, 1
    text = str(given)
    over = _OVER.search(text)
    shards = max(1, min(int(over.group(1)), copies)) if over else copies
    stage = _STAGE.search(text)
    if text.isdigit():
        number = int(text)
    elif "FSDP" in text:
        number = 3
    elif stage:
        number = int(stage.group(1))
    else:
        number = 1 if "dist-opt" in text else 0
    if number > 3:
        raise SkippedError(Reason.MALFORMED, f"zero is {given!r}")
    return number, shards if number else 1


def _recompute(record: Mapping[str, object], software: Software) -> str:
    """ "none", "full", "selective" (the attention core) or "ops" (the torchtitan policy: products of every second
    linear and the cheap ops). Where it is not published, what the software does by itself."""
    text = _text(record, "recompute").lower()
    if not text:
        return software.recompute
    if text.startswith("full"):
        return "full"
    if text.startswith(("selective (per-op", "selective (default")):
        return "ops"
    return "selective" if text.startswith("selective") else "none"
