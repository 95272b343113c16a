"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from passes.ir.plan import Block, ParameterPlan, Plan, ProgramPlan

_GIB = 1024**3


def plan_text(plan: Plan) -> str:
    """The whole plan: what it is for, what it costs, and every statement with its layouts."""
    devices = 1
    for size in plan.mesh.values():
        devices *= size
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = [f"{plan.model}: {axes} on {plan.cluster} ({devices} device{'s' if devices > 1 else ''})"]
    if plan.compiled:
        lines.append("  regions are compiled by torch")
    if plan.loss:
        lines.append("  with a loss outside of the model")
    if plan.outputs == "full":
        lines.append("  outputs are whole on every rank")
    for name, item in plan.inputs.items():
        lines.append(f"  input {name}: {item.dtype}{list(item.shape)}, {layout_text(item.layout)}")
    for name, value in plan.constants.items():
        lines.append(f"  constant {name}: {value}")
    for name, program in plan.programs.items():
        lines += ["", *_program(name, program, plan)]
    lines += ["", "parameters", *_parameters(plan.parameters)]
    if plan.whole_ops:
        lines += ["", "computed whole on every device, for want of a sharding rule: " + ", ".join(plan.whole_ops)]
    if plan.discovered:
        lines += [
            "",
            "split by discovered rules (found by running the ops, which is no proof): " + ", ".join(plan.discovered),
        ]
    return "\n".join(lines)


def layout_text(layout: Mapping[str, str]) -> str:
    """A layout by axis as text: "dp S(0), tp R", or one letter where all axes agree on R, I or P."""
    letters = set(layout.values())
    if len(letters) == 1 and not next(iter(letters)).startswith("S"):
        return next(iter(letters))
    return ", ".join(f"{axis} {letter}" for axis, letter in layout.items())


def seconds_text(seconds: float) -> str:
    """A time with its unit: "1.23 s", "45.6 ms", "789 us"."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor or unit == "us":
            return f"{seconds / factor:.3g} {unit}"
    raise AssertionError


def bytes_text(size: float) -> str:
    """A size with its unit: "1.23 GiB", "45.6 MiB", "789 KiB"."""
    for factor, unit in ((_GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= factor or unit == "KiB":
            return f"{size / factor:.3g} {unit}"
    raise AssertionError


def _program(name: str, program: ProgramPlan, plan: Plan) -> list[str]:
    total = sum(program.seconds.values())
    peak = sum(program.memory.values())
    spent = ", ".join(f"{what} {seconds_text(value)}" for what, value in program.seconds.items() if value)
    held = ", ".join(f"{what} {bytes_text(value)}" for what, value in program.memory.items() if value)
    proven = "optimal" if program.gap <= 1e-6 else f"at most {program.gap:.2%} above the optimum"
    lines = [
        f"{name}: predicted step {seconds_text(total)}, {proven}",
        f"  {spent}" + (f"; hidden communication {seconds_text(program.hidden)}" if program.hidden else ""),
        f"  computation {program.compute_share:.1%} of what one device would compute",
        f"  memory per device {bytes_text(peak)} of {bytes_text(plan.memory_limit)}, "
        f"at its peak ({program.peak_moment})",
        f"  {held}",
    ]
    if program.micro_batches > 1:
        gathered = "once" if program.gather_once else "for each"
        reduced = "once" if program.reduce_once else "after each"
        lines.append(
            f"  {program.micro_batches} micro-batches; parameters gathered {gathered}, gradients reduced {reduced}"
        )
    elif program.whole_batch:
        lines.append(f"  one micro-batch: {program.whole_batch}")
    if program.by_clock:
        lines.append("  a clock ended the search: another machine may find another plan")
    many = len(program.stages) > 1
    for number, stage in enumerate(program.stages):
        if many:
            lines.append(f"stage {number}")
        for block in stage.blocks:
            if block.rows:
                lines += ["", *_block(block, stage.recompute.get(block.name, "none"))]
    return lines


def _block(block: Block, recompute: str) -> list[str]:
    times = f" x {block.count}" if block.count > 1 else ""
    times += f", recompute {recompute}" if recompute != "none" else ""
    rows: list[tuple[str, ...]] = []
    for row in block.rows:
        before, after = " | ".join(row.before), " | ".join(row.after)
        if row.kind == "op":
            again = ", again in backward" if row.again else ""
            rows.append((f"  {row.name}", f"{row.how}{again}", before, f"-> {after}", row.type))
        else:
            again = ", again in backward" if row.again else ""
            rows.append((f"    ~ {row.name}", f"{row.how}{again}", before, f"-> {after}", row.type))
    return [f"{block.name}{times}", *_columns(rows)]


def _parameters(parameters: Mapping[str, ParameterPlan]) -> list[str]:
    """Parameters, those that differ only in numbers in their names on one line."""
    groups: dict[tuple[str, str, tuple[int, ...], tuple[tuple[str, str], ...], bool], list[str]] = {}
    for name, item in parameters.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        kind = (pattern, item.dtype, item.shape, tuple(item.layout.items()), item.trainable)
        groups.setdefault(kind, []).append(name)
    rows = []
    for (pattern, dtype, shape, layout, trainable), names in groups.items():
        shown = f"{pattern} x {len(names)}" if len(names) > 1 else names[0]
        frozen = "" if trainable else "frozen"
        rows.append((f"  {shown}", f"{dtype}{list(shape)}", f"stored {layout_text(dict(layout))}", frozen))
    return _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their cells under each other."""
    if not rows:
        return []
    widths = [_width(row[index] for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _width(cells: Iterable[str]) -> int:
    return max(len(cell) for cell in cells)
