"""Analysis of a folded program: properties that building its planning problem needs, computed once."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from passes.cost.fusion import Fused, joined
from passes.ir.program import Folded, dependents
from passes.ir.rule import Saved
from passes.rules.cheap import Cheap, how_cheap, second_products
from passes.rules.strategies import OpContext, op_context
from passes.rules.strides import strided
from passes.strategies.places import Placed, place
from passes.strategies.saved import passed_on, saved_tensors


@dataclass(frozen=True)
class Training:
    """Whether a parameter trains, and the number of parameters that its name stands for: one in each copy of a
    region."""

    trainable: bool
    count: int


@dataclass(frozen=True)
class Analysis:
    """A folded program and its properties.

    `placed` are its ops in order, `blocks` the names of the blocks that contain them. `parameters` and `constant`
    (buffers and constants) are by the names that ops use, so those of regions are among them; `names` maps the names of
    a region's parameters and buffers to their names in the program (of the first copy), `exported` those of tensors
    that are used outside of a region to their names inside. `depends` and `strided` are names of tensors
    (`dependents` and `strided` say which). By keys of ops: their contexts (`contexts`), their saved
    tensors (`saved`), and whether they are `cheap` to recompute. `second` are the keys of the products that recompute
    of "ops" recomputes, `fused` ops that are compiled together with others, by their first result.
    """

    folded: Folded
    placed: Sequence[Placed]
    blocks: Sequence[str]
    parameters: Mapping[str, Training]
    constant: Set[str]
    names: Mapping[str, str]
    exported: Mapping[str, str]
    depends: Set[str]
    strided: Set[str]
    contexts: Mapping[str, OpContext]
    saved: Mapping[str, Sequence[Saved]]
    cheap: Mapping[str, Cheap]
    second: Set[str]
    fused: Mapping[str, Fused]

    def inside(self, name: str) -> str:
        """The name of a tensor in the region or program that computes it."""
        return self.exported.get(name, name)


def analyze(folded: Folded) -> Analysis:
    """The analysis of `folded`."""
    placed, blocks = place(folded)
    parameters, constant = _owned(folded)
    moved = strided(folded)
    contexts = {
        item.op.key: op_context(item.op, item.rule, folded.types, folded.flowing, parameters.keys(), moved)
        for item in placed
    }
    given = passed_on(folded, placed, moved)
    return Analysis(
        folded=folded,
        placed=placed,
        blocks=blocks,
        parameters=parameters,
        constant=constant,
        # A name that occurs in two regions belongs to the first.
        names={own: names[0] for region in reversed(folded.regions) for own, names in region.owned.items()},
        exported={
            name: export.value
            for region in folded.regions
            for export in region.exports
            for name in export.names
            if name
        },
        depends=dependents(folded),
        strided=moved,
        contexts=contexts,
        saved={key: saved_tensors(context) for key, context in contexts.items()},
        cheap={
            item.op.key: Cheap.NEVER
            if item.op.results[0] in given
            else how_cheap(item.op, item.rule, contexts[item.op.key].copies)
            for item in placed
        },
        second={
            key
            for region in folded.regions
            for key in second_products((item.op, item.rule) for item in placed if item.region is region)
            if contexts[key].op.results[0] not in given
        },
        fused=joined(folded),
    )


def _owned(folded: Folded) -> tuple[dict[str, Training], set[str]]:
    """The parameters, and the names of buffers and constants, of the program and of its regions."""
    program = folded.program
    parameters = {item.name: Training(item.trainable, 1) for item in program.parameters}
    constant = {item.name for item in program.buffers} | set(program.constants)
    for region in folded.regions:
        for own, names in region.owned.items():
            if names[0] in parameters:
                parameters[own] = Training(parameters[names[0]].trainable, region.count)
            else:
                constant.add(own)
    return parameters, constant
