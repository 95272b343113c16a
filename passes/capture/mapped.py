"""`torch.vmap` in a trace: the ops of one element become those of all.

`torch.export` keeps the levels of vmap as calls of functions, with the ops of a single element between them, which are
no ops on tensors. Such a part of a graph is traced once more: then vmap itself turns them into ops on all elements.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import VMAP_BEGIN, VMAP_END, VMAP_IDLE, fake_mode_of, make_fx

# The metadata that say where in the model a node comes from.
_SOURCE = ("stack_trace", "nn_module_stack", "source_fn_stack")


def without_vmap(graph_module: GraphModule) -> None:
    """Replace the levels of vmap in a graph and in its subgraphs, and the ops between them, by ops on all elements, in
    place."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.target == VMAP_IDLE:
                    module.graph.erase_node(node)
            for part in list(_parts(module.graph)):
                _replace(module, part)


def _parts(graph: Graph) -> Iterator[list[Node]]:
    """The nodes from the beginning of each outermost level to its end."""
    part: list[Node] = []
    depth = 0
    for node in graph.nodes:
        depth += node.target == VMAP_BEGIN
        if depth:
            part.append(node)
        if node.target == VMAP_END:
            depth -= 1
            if not depth:
                yield part
                part = []


def _replace(graph_module: GraphModule, part: Sequence[Node]) -> None:
    """Replace a part of the graph by its trace."""
    graph = graph_module.graph
    # Subgraphs stay where they are called.
    constants = [node for node in part if node.op == "get_attr" and _is_tensor(graph_module, node)]
    for node in constants:
        part[0].prepend(node)
    inside = dict.fromkeys(node for node in part if node not in constants)
    given = list(dict.fromkeys(node for own in inside for node in own.all_input_nodes if node not in inside))
    made = [node for node in inside if any(user not in inside for user in node.users)]
    traced = _traced(graph_module, list(inside), given, made)
    known: dict[Node, Node] = {}
    places = iter(given)
    with graph.inserting_before(part[0]):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(places)
            elif node.op == "output":
                for old, new in zip(made, node.args[0], strict=True):
                    old.replace_all_uses_with(known[new], lambda user: user not in inside)
            else:
                known[node] = graph.node_copy(node, known.__getitem__)
                known[node].meta.update({name: part[0].meta[name] for name in _SOURCE if name in part[0].meta})
                if node.op == "get_attr":
                    known[node].target = _kept(graph_module, getattr(traced, str(node.target)))
    for node in reversed(inside):
        graph.erase_node(node)


def _is_tensor(graph_module: GraphModule, node: Node) -> bool:
    """Whether an attribute that a node gets is a tensor."""
    return isinstance(getattr(graph_module, str(node.target), None), torch.Tensor)


def _kept(graph_module: GraphModule, constant: object) -> str:
    """Keep a constant under a name of its own."""
    number = 0
    while hasattr(graph_module, f"vmap_constant_{number}"):
        number += 1
    name = f"vmap_constant_{number}"
    setattr(graph_module, name, constant)
    return name


def _traced(
    graph_module: GraphModule, part: Sequence[Node], given: Sequence[Node], made: Sequence[Node]
) -> GraphModule:
    """A part of a graph as a function of what it is given, traced with vmap at work."""
    graph, known = Graph(), dict[Node, Node]()
    for node in given:
        known[node] = graph.placeholder(node.name)
    for node in part:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in made))
    mode = fake_mode_of(node.meta["val"] for node in given if "val" in node.meta)
    values = [
        node.meta["val"] if "val" in node.meta else mode.from_tensor(getattr(graph_module, str(node.target)))
        for node in given
    ]
    with torch.no_grad(), mode:
        traced = make_fx(GraphModule(graph_module, graph))(*values)
    traced.graph.eliminate_dead_code()
    return traced
