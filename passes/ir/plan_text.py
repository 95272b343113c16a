"""A plan as text: in lines of at most 120 columns, or as a table in full."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from passes.ir.plan import Block, ParameterPlan, Plan, ProgramPlan

# Columns of a printed plan.
_WIDTH = 120
# Columns that a cell keeps when its row is too long.
_LEAST = 12


def plan_text(plan: Plan) -> str:
    """The plan in lines of at most 120 columns: its head, its costs, and every statement with the layout of its result.
    Names of ops are given without the region that they are in, and long cells are shortened in their middle."""
    return "\n".join(piece for line in _lines(plan, _WIDTH) for piece in _wrapped(line))


def plan_table(plan: Plan) -> str:
    """The plan in full: every statement with the layouts of all operands and results, in lines of any length."""
    return "\n".join(_lines(plan, None))


def _wrapped(line: str) -> list[str]:
    """A line as lines of at most 120 columns, the further ones indented more."""
    if len(line) <= _WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=True, break_on_hyphens=False)


def _lines(plan: Plan, width: int | None) -> list[str]:
    """The lines of a plan, with rows of at most `width` columns; None leaves them as they are."""
    devices = prod(plan.mesh.values())
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = [f"{plan.model}: {axes} on {plan.cluster} ({devices} device{'s' if devices > 1 else ''})"]
    if plan.compiled:
        lines.append("  regions are compiled by torch")
    if plan.loss:
        lines.append("  with a loss outside of the model")
    if plan.outputs == "full":
        lines.append("  outputs are whole on every rank")
    if plan.outputs == "scalars":
        lines.append("  scalars are the only outputs")
    lines += [
        f"  input {name}: {item.dtype}{list(item.shape)}, {layout_text(item.layout)}"
        for name, item in plan.inputs.items()
    ]
    lines += [f"  constant {name}: {value}" for name, value in plan.constants.items()]
    for name, program in plan.programs.items():
        lines += ["", *_program(name, program, plan, width)]
    lines += ["", "parameters", *_columns(_parameters(plan.parameters), width)]
    if plan.whole_ops:
        lines += ["", "computed whole on every device, for want of a sharding rule: " + ", ".join(plan.whole_ops)]
    for line in plan.unsplit_over_sequence:
        lines += ["", f"not split over the sequence on {line}"]
    if plan.discovered:
        lines += [
            "",
            "split by discovered rules (found by running the ops, which is no proof): " + ", ".join(plan.discovered),
        ]
    return lines


def layout_text(layout: Mapping[str, str]) -> str:
    """A layout by axis as text: "dp S(0), tp R", or one placement where all axes agree on R, I or P."""
    placements = set(layout.values())
    if len(placements) == 1 and not next(iter(placements)).startswith("S"):
        return next(iter(placements))
    return ", ".join(f"{axis} {placement}" for axis, placement in layout.items())


def seconds_text(seconds: float) -> str:
    """A time with its unit: "1.23 s", "45.6 ms", "789 us"."""
    return _with_unit(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def bytes_text(size: float) -> str:
    """A size with its unit: "1.23 GiB", "45.6 MiB", "789 KiB"."""
    return _with_unit(size, ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")))


def _with_unit(number: float, units: Sequence[tuple[float, str]]) -> str:
    """A number in the largest unit that it has at least one of, else in the last."""
    factor, unit = next((unit for unit in units if number >= unit[0]), units[-1])
    return f"{number / factor:.3g} {unit}"


def _program(name: str, program: ProgramPlan, plan: Plan, width: int | None) -> list[str]:
    """The head of one program, and its blocks."""
    peak = sum(program.memory.values())
    spent = ", ".join(f"{what} {seconds_text(value)}" for what, value in program.seconds.items() if value)
    memory = ", ".join(f"{what} {bytes_text(value)}" for what, value in program.memory.items() if value)
    proven = ("optimal", "the optimum") if program.complete else ("the best of those searched",) * 2
    claim = proven[0] if program.gap <= 1e-6 else f"at most {program.gap:.2%} above {proven[1]}"
    if not program.complete and program.bound_s:
        less = 1 - program.bound_s / program.step_s
        claim += f"; no mesh or configuration takes less than {seconds_text(program.bound_s)} ({less:.1%} less)"
    lines = [
        f"{name}: predicted step {seconds_text(program.step_s)}, {claim}",
        f"  {spent}" + (f"; hidden communication {seconds_text(program.hidden)}" if program.hidden else ""),
        f"  computation {program.compute_share:.1%} of what one device would compute",
        f"  {_throughput(program)}",
        *_idle(program, plan),
        f"  memory per device {bytes_text(peak)} of {bytes_text(plan.memory_limit)}, "
        f"at its peak ({program.peak_moment})",
        f"  {memory}",
    ]
    if program.micro_batches > 1:
        gathered = "once" if program.gather_once else "for each"
        reduced = "once" if program.reduce_once else "after each"
        lines.append(
            f"  {program.micro_batches} micro-batches; parameters gathered {gathered}, gradients reduced {reduced}"
        )
        if program.coupled:
            lines.append(f"  computed for each micro-batch and averaged over them: {', '.join(program.coupled)}")
    elif program.whole_batch:
        lines.append(f"  one micro-batch: {program.whole_batch}")
    if len(program.stages) > 1:
        lines += _pipeline(program, plan)
    for number, stage in enumerate(program.stages):
        if len(program.stages) > 1:
            memory = bytes_text(sum(stage.memory.values()))
            lines += ["", f"stage {number}: memory per device {memory} at its peak ({stage.peak_moment})"]
        for block in stage.blocks:
            if block.rows or block.bytes:
                lines += ["", *_block(block, width)]
    rest = sum(program.memory.values()) - sum(block.bytes for stage in program.fullest for block in stage.blocks)
    beside = sum(program.seconds.get(what, 0.0) for what in ("inputs", "optimizer"))
    return [*lines, "", f"inputs and optimizer step: {_costs(beside, rest)}"]


def _pipeline(program: ProgramPlan, plan: Plan) -> Iterator[str]:
    """The schedule and the stages of a pipeline, and a picture of the schedule."""
    ranks = f"{plan.pipeline_axis} {program.ranks}" if plan.pipeline_axis else str(program.ranks)
    alone = "" if program.single_s is None else f"; without a pipeline a step takes {seconds_text(program.single_s)}"
    yield f"  {len(program.stages)} pipeline stages on {ranks}, schedule {program.schedule}{alone}"
    begins = (None, *program.cuts)
    for number, (stage, begin) in enumerate(zip(program.stages, begins, strict=True)):
        each = f"forward {seconds_text(stage.forward_s)}, backward {seconds_text(stage.backward_s)}"
        start = f"from {begin}, " if begin is not None else ""
        each += f", weights {seconds_text(stage.weight_s)}" if stage.weight_s else ""
        left = f", weights of {stage.weights_left} left" if stage.weights_left else ""
        kinds = dict.fromkeys(stage.recompute.values())
        again = f", recompute {' and '.join(kinds)}" if kinds else ""
        yield (
            f"    stage {number}: {start}{stage.layers} layer{'' if stage.layers == 1 else 's'}, "
            f"{_count_text(stage.parameters)} parameters, {each} a micro-batch, {stage.in_flight} in flight{left}"
            f"{again}, "
            f"{bytes_text(sum(stage.memory.values()))}"
        )
    yield from (f"    {line}" for line in program.drawn)


def _count_text(count: float) -> str:
    """A number with its unit: "1.23 G", "45.6 M", "789 K"."""
    return _with_unit(count, ((1e9, "G"), (1e6, "M"), (1e3, "K"))) if count >= 1e3 else str(int(count))


def _throughput(program: ProgramPlan) -> str:
    """Tokens (or samples) per second of a device, and MFU with its convention."""
    rate, unit = program.tokens_per_second_per_device, "tokens"
    if not program.work.tokens:
        rate, unit = program.samples_per_second_per_device, "samples"
    shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{shown} {unit}/s per device, MFU {program.mfu:.1%} (without recompute, causal attention counted half)"


def _idle(program: ProgramPlan, plan: Plan) -> Iterator[str]:
    """The axes that split next to nothing, and what would use their devices."""
    idle = program.idle
    if idle is None:
        return
    axes = ", ".join(f"{name} {plan.mesh[name]}" for name in idle.axes)
    busy = f"{idle.busy} of {program.work.devices} devices would compute as fast"
    yield f"  idle: {axes} splits little of the computation; {busy}"
    if idle.batches:
        batches = " or ".join(map(str, idle.batches))
        yield f"    a batch of {batches} could be split over it, one of {program.work.samples} cannot"
    if idle.fewer:
        step = seconds_text(program.step_s)
        yield f"    take {idle.fewer} devices: a step takes {seconds_text(idle.fewer_s)} there, and {step} here"


def _costs(seconds: float, size: float) -> str:
    return f"{seconds_text(seconds)}, {bytes_text(size)} at the peak"


def _block(block: Block, width: int | None) -> list[str]:
    """The rows of a block under its name."""
    times = f" x {block.count}" if block.count > 1 else ""
    times += f", recompute {block.recompute}" if block.recompute != "none" else ""
    rows: list[tuple[str, ...]] = []
    owner = block.region or block.name
    for row in block.rows:
        name = row.name if width is None else row.name.removeprefix(f"{owner}.").removeprefix(owner)
        shown = f"  {name}" if row.kind == "op" else f"    ~ {name}"
        rerun = "recomputed" if row.kind == "op" else "regathered"
        how = f"{row.how}, {rerun} in backward" if row.rerun else row.how
        operands = (" | ".join(row.before),) if width is None else ()
        rows.append((shown, how, *operands, f"-> {' | '.join(row.after)}", row.type))
    return [f"{block.name}{times}: {_costs(block.seconds, block.bytes)}", *_columns(rows, width)]


def _parameters(parameters: Mapping[str, ParameterPlan]) -> list[tuple[str, ...]]:
    """Rows of parameters; those that differ only in the numbers in their names are one row."""
    many = any(item.stages != (0,) for item in parameters.values())
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, item in parameters.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        stored = f"stored {layout_text(item.layout)}"
        stages = f"on stage {', '.join(map(str, item.stages))}" if many else ""
        row = (f"{item.dtype}{list(item.shape)}", stored, "" if item.trainable else "frozen", stages)
        groups.setdefault((pattern, *row), []).append(name)
    return [
        (f"  {pattern} x {len(names)}" if len(names) > 1 else f"  {names[0]}", *row)
        for (pattern, *row), names in groups.items()
    ]


def _columns(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Rows with their cells in columns, the widest of which are narrowed until a row has at most `width` characters."""
    if not rows:
        return []
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    shown = ([_shortened(cell, most) for cell, most in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cell.ljust(most) for cell, most in zip(row, widths, strict=True)).rstrip() for row in shown]


def _shortened(cell: str, width: int) -> str:
    """A cell of at most `width` characters; the middle of a longer one is left out."""
    if len(cell) <= width:
        return cell
    end = (width - 1) * 2 // 3
    return f"{cell[: width - 1 - end]}…{cell[len(cell) - end :]}"
