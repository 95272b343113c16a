"""Stock models on meshes of one to four axes, and the shapes of meshes."""

import pytest

from passes.ir.mesh import Mesh
from passes.search.meshes import cut_one, finer, is_searched_wholly, merged, mesh_of, partitions, shapes, shifted
from tests.autopar.comparing import exact, marked
from tests.models import MODELS, llama, tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_axis_of_two(name):
    exact(MODELS[name](), "2", tokens(batch=8))


@pytest.mark.long
@pytest.mark.parametrize("name", marked(MODELS, {"gpt2"}))
def test_one_axis_of_four(name):
    exact(MODELS[name](), "4", tokens(batch=8))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_three_axes(name):
    exact(MODELS[name](), "2x2x2", tokens(batch=8))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["train", "infer"])
def test_padding_mask_on_three_axes(objective):
    model, training = llama(num_hidden_layers=1), objective == "train"
    exact(model, "2x2x2", tokens(batch=8, padding=True, labels=training), objective=objective)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_four_axes(name):
    exact(MODELS[name](), "2x2x2x2", tokens(batch=16))


# --- shapes to search among -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "node", "names"),
    [
        ((8,), 8, ("intra",)),
        ((16,), 8, ("inter",)),
        ((2, 8), 8, ("inter", "intra")),
        ((2, 2, 8), 8, ("inter0", "inter1", "intra")),
        ((4, 2, 2, 4), 8, ("inter0", "inter1", "intra0", "intra1")),
        ((2, 4), 64, ("intra0", "intra1")),
        ((1,), 8, ("intra",)),
    ],
)
def test_axes_are_called_by_where_they_lie(sizes, node, names):
    """An axis whose groups lie in one node is "intra"; all that is outside of one that does not is "inter"."""
    assert mesh_of(sizes, node).names == names


@pytest.mark.parametrize(("devices", "node"), [(1, 8), (7, 8), (8, 8), (12, 4), (64, 8), (96, 8)])
def test_shapes_have_up_to_two_axes(devices, node):
    """All of these; or where there are many, those whose inner axis lies within two nodes."""
    found = [mesh.sizes for mesh in shapes(devices, node)]
    inner = [size for size in range(1, devices + 1) if devices % size == 0]
    if devices == 96:
        inner = [size for size in inner if size <= 2 * node]
    expected = {tuple(size for size in (devices // size, size) if size > 1) or (1,) for size in inner}
    assert set(found) == expected
    assert len(found) == len(expected)
    nearest = min(abs(size - min(node, devices)) for *_, size in expected)
    assert abs(found[0][-1] - min(node, devices)) == nearest, "one node first"


def test_finer_meshes_cut_one_axis():
    """The origin of an axis names its axis of the old mesh; the two new ones together are the old one."""
    mesh = mesh_of((6, 8), 8)
    found = {cut.sizes: origins for cut, origins in finer(mesh, 8, 4)}
    assert found == {
        (3, 2, 8): [None, None, 1],
        (2, 3, 8): [None, None, 1],
        (6, 4, 2): [0, None, None],
        (6, 2, 4): [0, None, None],
    }
    assert not list(finer(mesh_of((2, 2, 2, 2), 8), 8, 4)), "four axes at most"
    assert not list(finer(mesh_of((7,), 8), 8, 4)), "a prime cannot be cut"


def test_neighbouring_axes_are_taken_together():
    """In every way into so many groups; what stays alone keeps its name."""
    assert list(partitions(4, 2)) == [((0,), (1, 2, 3)), ((0, 1), (2, 3)), ((0, 1, 2), (3,))]
    assert list(partitions(3, 3)) == [((0,), (1,), (2,))]
    mesh = Mesh(("pod", "dp", "cp", "tp"), (2, 3, 4, 5))
    found = merged(mesh, ((0,), (1, 2), (3,)))
    assert found.sizes == (2, 12, 5)
    assert (found.names[0], found.names[2]) == ("pod", "tp")
    assert found.names[1] not in mesh.names


def test_groups_are_cut_axis_by_axis():
    """The first group that can be cut is cut; the others do not change."""
    groups, origins = cut_one(((0,), (1, 2, 3)))
    assert (groups, origins) == (((0,), (1,), (2, 3)), [0, None, None])
    groups, origins = cut_one(((0, 1), (2, 3)))
    assert (groups, origins) == (((0,), (1,), (2, 3)), [None, None, 1])
    assert cut_one(groups) == (((0,), (1,), (2,), (3,)), [0, 1, None, None])


def test_factors_are_shifted_to_the_next_axis():
    """The smallest factor of an axis, to either side; an axis never gets lost, and the other axes stay."""
    found = {mesh.sizes: origins for mesh, origins in shifted(mesh_of((6, 2, 9), 8), 8)}
    assert found == {(3, 4, 9): [None, None, 2], (6, 6, 3): [0, None, None]}


@pytest.mark.parametrize(
    ("devices", "wholly"), [(1, True), (2, True), (8, False), (12, False), (13, True), (15, True), (22, True)]
)
def test_few_numbers_of_devices_are_searched_wholly(devices, wholly):
    """A mesh may have an axis for each prime factor; `shapes` has up to two axes."""
    assert is_searched_wholly(devices) is wholly
    if wholly:
        every = {(a, devices // a) for a in range(2, devices) if devices % a == 0} | {(devices,)}
        assert {mesh.sizes for mesh in shapes(devices, 8)} == every
