"""Generated modules, run under the type checker."""

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field

import spmd_types as spmd
import spmd_types.checker
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.planner import PlannedModel
from autopar.runtime import Container
from autopar.runtime.generated.bases import place
from autopar.runtime.state import axes_of, local_part
from passes.ir.layout import I, Layout, R, local_shape, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.vocabulary import FORMS
from tests.autopar.typed.collectives import collectives
from tests.autopar.typed.forms import FORM_RULES
from tests.autopar.typed.layouts import LETTERS, SpmdTypeError, annotate, is_located, layout_of
from tests.autopar.typed.operators import Vocabulary
from tests.autopar.without_engine import step_by_step


@dataclass
class Report:
    """Lines of a generated module whose comment has a layout: those of which the checker found the same by itself, and
    those of which it was told which dim is split, or that a sum is pending. `alike` are the lines of collectives on
    tensors without gradient, where R and I say the same."""

    proved: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    alike: set[int] = field(default_factory=set)
    outputs: tuple[object, ...] = ()
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


_COMMENT = re.compile(r"# \w+\[([\d, ]*)\] ([^#]*?)(?:  \S+:\d+)?")


def checked(source: str) -> str:
    """`source` with a call of `held(value, "shape", "layout", line)` behind every statement whose comment has a type
    and a layout."""
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    calls: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        text = comments.get(node.end_lineno or 0) or (above if above.startswith("#") else "")
        match = _COMMENT.fullmatch(text)
        if match is not None:
            shape, layout = match.groups()
            calls[node.end_lineno or 0] = (
                f"{' ' * node.col_offset}held({node.targets[0].id}, ({shape},), {layout!r}, {node.lineno})"
            )
    result = []
    for number, line in enumerate(lines, 1):
        result += [line, calls[number]] if number in calls else [line]
    return "\n".join(result).replace("(,)", "()") + "\n"


def read_layout(text: str, mesh: Mesh) -> Layout:
    """A layout as generated comments have it: "dp S(0), tp R", or "R" for all axes."""
    found = dict(re.findall(r"(\w+) ([RIP]|S\([\d, ]+\))", text))
    return tuple(parse_placement(found.get(name, text)) for name in mesh.names)


def same_type(tensor: Tensor, layout: Layout, mesh: Mesh) -> bool:
    """Whether `tensor` has just the type of `layout`; what has no gradient is R and I alike."""
    try:
        have = layout_of(tensor, mesh)
    except SpmdTypeError:
        return False
    if tensor.requires_grad:
        return have == layout
    return [R if item == I else item for item in have] == [R if item == I else item for item in layout]


def run_typed(
    model: nn.Module,
    compiled: PlannedModel,
    device_mesh: DeviceMesh,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    source: str | None = None,
    comments: bool = True,
) -> Report:
    """Run the program for training of `compiled` under the type checker, forward and backward.

    Without `inputs` tensors have no values. With `comments` the layouts in the comments are
    held against the types; `source` runs instead of the generated source.

    Raises SpmdTypeError where the checker refuses an operation, and where an output has not the type of the plan.
    """
    program = compiled.programs["train"]
    mesh = Mesh(tuple(device_mesh.mesh_dim_names or ()), tuple(device_mesh.shape))
    report = Report()
    namespace: dict[str, object] = {}
    text = program.source if source is None else source
    exec(compile(checked(text) if comments else text, "<generated>", "exec"), namespace)

    def held(value: Tensor, shape: tuple[int, ...], layout_text: str, line: int) -> None:
        layout = read_layout(layout_text, mesh)
        where = f"line {line}, {shape} {layout_text}"
        if tuple(value.shape) != local_shape(shape, layout, mesh):
            raise SpmdTypeError(f"{where}: the local shape is {tuple(value.shape)}")
        if same_type(value, layout, mesh):
            report.proved.append(where)
            return
        grown = getattr(value, "grown", ())
        longer = [axis for axis, placement in enumerate(layout) if placement.kind == "S" and placement.dim in grown]
        for axis in longer:
            spmd.mutate_type(value, mesh.names[axis], src=spmd.R, dst=spmd.V)
        if is_located(value) and not longer:
            raise SpmdTypeError(f"{where}: the checker finds {layout_of(value, mesh)}")
        annotate(value, _flavored(value, layout, mesh), mesh)
        report.told.append(where)

    replaced = {**collectives(mesh, report.alike), **FORM_RULES, "held": held}
    replaced["local"] = replaced["gathered"] = lambda tensor: tensor
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    untyped = set(FORMS) & used - set(replaced)
    assert not untyped, f"no typing rule for {', '.join(sorted(untyped))}: see `typed.forms`"
    namespace.update({name: value for name, value in replaced.items() if name in namespace or name == "held"})
    with spmd.set_current_mesh(device_mesh):
        root = _root(model, compiled, device_mesh, mesh, with_values=inputs is not None)
        device = torch.device("meta" if inputs is None else "cpu")
        coordinate = device_mesh.get_coordinate()
        given = []
        for item in program.inputs:
            if inputs is None:
                shape = local_shape(item.type.shape, item.layout, mesh)
                part = torch.empty(shape, dtype=item.dtype, device=device)
            else:
                part = local_part(inputs[item.name], item.layout, coordinate, mesh)
            given.append(annotate(part, item.layout, mesh))
        whole = (R,) * len(mesh.names)
        constants = {name: annotate(value.to(device), whole, mesh) for name, value in program.tensors.items()}
        kind = namespace[program.class_name]
        axes = axes_of(device_mesh, range(len(mesh.sizes), len(mesh.spans)))
        steps = collectives(mesh, report.alike)
        seen = step_by_step(model, root, program.held, compiled.stored, mesh, axes, steps)
        generated = kind(seen, axes, device, constants)  # type: ignore[operator]
        with spmd.checker.typecheck(local=False), Vocabulary():
            report.outputs = generated.forward(*given)
            for value, planned in zip(report.outputs, program.outputs, strict=True):
                if planned.layout is not None and not same_type(value, planned.layout, mesh):
                    raise SpmdTypeError(
                        f"output {planned.name} is planned as {planned.layout}, the checker finds "
                        f"{layout_of(value, mesh)}"
                    )
            report.outputs[0].backward()
    report.gradients = {name: parameter.grad for name, parameter in root.named_parameters()}
    return report


def _flavored(value: Tensor, layout: Layout, mesh: Mesh) -> Layout:
    """`layout` with R and I as the type of `value` has them, if it has no gradient."""
    if value.requires_grad:
        return layout
    kinds = [spmd.get_axis_local_type(value, name) for name in mesh.names]
    return tuple(
        LETTERS[kind] if placement.kind in "RI" and kind in (spmd.R, spmd.I) else placement
        for kind, placement in zip(kinds, layout, strict=True)
    )


def _root(
    model: nn.Module, compiled: PlannedModel, device_mesh: DeviceMesh, mesh: Mesh, *, with_values: bool
) -> Container:
    """Parameters as this rank's parts and buffers, with the types of the plan; plain tensors, without values unless
    asked for."""
    root = Container()
    coordinate = device_mesh.get_coordinate()
    placed: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in placed:
            layout = compiled.stored.get(name, (I,) * len(mesh.names))
            if with_values:
                part = local_part(parameter.detach(), layout, coordinate, mesh)
            else:
                shape = local_shape(tuple(parameter.shape), layout, mesh)
                part = torch.empty(shape, dtype=parameter.dtype, device="meta")
            placed[id(parameter)] = annotate(nn.Parameter(part, parameter.requires_grad), layout, mesh)
        place(root, name, placed[id(parameter)])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in placed:
            whole = buffer.detach().clone() if with_values else buffer.to("meta")
            placed[id(buffer)] = annotate(whole, (R,) * len(mesh.names), mesh)
        place(root, name, placed[id(buffer)])
    return root
