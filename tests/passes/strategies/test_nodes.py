"""Strategies of nodes on a mesh whose sizes are figures."""

import sympy

from autopar.models.huggingface import tracing
from passes.capture import Tracing, capture
from passes.constrain import constrain
from passes.cost.cluster import CLUSTERS
from passes.ir.figures import size_of
from passes.ir.mesh import Mesh
from passes.normalize import normalize
from passes.regions import fold
from passes.strategies import Setting, planning_problem
from tests.models import gpt2, tokens


def test_layouts_are_those_of_plain_sizes() -> None:
    """Placements are equal, and found in a dict as well, whichever node makes them: a tensor that two axes split is one
    tensor in formulas, too."""
    model, inputs = gpt2(), tokens(8)
    folded = fold(normalize(capture(model, inputs, Tracing(True, True, tracing(model, inputs, "train")))))
    mesh = Mesh.of({name: size_of(2, sympy.Symbol(name)) for name in ("dp", "tp")})
    plain = Mesh.of({"dp": 2, "tp": 2})
    found = []
    for each in (mesh, plain):
        problem = planning_problem(folded, constrain(folded.program, {}, plain), Setting(each, CLUSTERS["ideal"], 2))
        strategies = [strategy for node in problem.nodes for strategy in node.strategies]
        found.append({layout for own in strategies for layout in (*own.operands, *own.results)})
    assert found[0] == found[1]
    assert any(placement.kind == "S" and placement.major > 1 for layout in found[0] for placement in layout)
