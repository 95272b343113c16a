import gc
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.nn.utils import parametrize

from autopar import _torch
from autopar.runtime.fsdp._torch import NamedParamGroup
from autopar.testing import run_ranks


def test_hooks_of_parameters():
    parameter = nn.Parameter(torch.ones(2))
    assert (_torch.tensor_hooks(parameter), _torch.post_accumulate_hooks(parameter)) == ((), ())

    def of_gradient(gradient):
        return gradient

    def of_parameter(parameter):
        return None

    assert not _torch.has_hooks(parameter)
    for register, hook in (
        (parameter.register_hook, of_gradient),
        (parameter.register_post_accumulate_grad_hook, of_parameter),
    ):
        handle = register(hook)
        assert _torch.has_hooks(parameter)
        handle.remove()
        assert not _torch.has_hooks(parameter)
    parameter.register_hook(of_gradient)
    parameter.register_post_accumulate_grad_hook(of_parameter)
    assert _torch.tensor_hooks(parameter) == (of_gradient,)
    assert _torch.post_accumulate_hooks(parameter) == (of_parameter,)


def test_hooks_of_modules():
    module = nn.Linear(2, 2)
    assert not _torch.call_hooks(module)
    module.register_full_backward_pre_hook(print)
    assert not _torch.call_hooks(module, backward=False)
    assert _torch.call_hooks(module) == [print]
    module.register_forward_hook(repr)
    assert _torch.call_hooks(module, backward=False) == [repr]


def test_hooks_on_all_modules():
    assert not _torch.global_backward_hooks()
    handles = register_module_full_backward_pre_hook(print), register_module_full_backward_hook(repr)
    assert _torch.global_backward_hooks() == [print, repr]
    for handle in handles:
        handle.remove()
    assert not _torch.global_backward_hooks()


def test_nodes_that_a_backward_pass_comes_to():
    one, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in (one, other)]
    found = []
    result = (one * other).sum()
    result.register_hook(lambda gradient: found.extend(map(_torch.is_computed_in_backward, nodes)))
    result.backward(inputs=[one])
    assert found == [True, False]


def test_tables_of_modules():
    module, other = nn.Module(), nn.BatchNorm1d(2)
    _torch.share_tables(module, other)
    other.bias = nn.Parameter(torch.ones(2))
    assert module.bias is other.bias
    assert module.state_dict().keys() == other.state_dict().keys()
    assert _torch.parts_of(nn.Sequential(other)) == {"0": other}


def test_state_of_a_module_with_parametrizations():
    module = nn.Linear(2, 2)
    parametrize.register_parametrization(module, "weight", nn.ReLU())
    state = _torch.pickled_state(module, {}, {"weight": nn.Parameter(torch.ones(2, 2))})
    plain = nn.Linear.__new__(nn.Linear)
    vars(plain).update(state)
    assert sorted(plain.state_dict()) == ["bias", "weight"]
    assert "parametrizations" not in dict(plain.named_children())


def test_parts_of_a_flat_tensor():
    flat, like = torch.arange(11.0), [torch.empty(2, 3), torch.empty(()), torch.empty(4)]
    parts = _torch.parts_of_flat(flat, like)
    assert [part.shape for part in parts] == [tensor.shape for tensor in like]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), flat)
    parts[2].zero_()
    assert not flat[7:].any()


def _run_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = torch.arange(6.0).reshape(3, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    local = _torch.local_tensor(tensor)
    assert local is _torch.local_tensor(tensor)
    assert torch.equal(local, whole.chunk(2)[dist.get_rank()])
    spec = _torch.spec_of(tensor)
    assert isinstance(spec, _torch.DTensorSpec)
    assert spec.placements == tensor.placements
    assert spec.shape == whole.shape
    again = _torch.as_distributed(local, spec)
    assert torch.equal(again.full_tensor(), whole)
    assert not again.requires_grad
    shape, offset = _torch.local_shape_and_offset(whole.shape, mesh, tensor.placements)
    assert torch.equal(local, whole[offset[0] : offset[0] + shape[0]])
    strided = distribute_tensor(whole.T.contiguous(), mesh, [_torch.StridedShard(0, split_factor=1)])
    assert torch.equal(_torch.local_tensor(strided), whole.T[dist.get_rank()][None])
    with _torch.without_subclasses():
        assert type(torch.Tensor.detach(tensor)) is DTensor

    group = mesh.get_group(0)
    _torch.set_group_timeout(group, timedelta(seconds=77))
    assert _torch.group_timeout(group) == timedelta(seconds=77)
    assert _torch.backend_name(group, torch.device("cpu")) == "gloo"
    store = _torch.default_store()
    assert isinstance(store, _torch.Store)
    store.set(f"key {dist.get_rank()}", "value")
    summed = _torch.collectives.all_reduce(local.new_ones(1), "sum", group.group_name)
    assert _torch.collectives.wait_tensor(summed).item() == 2
    with _torch.named_group("by_name"):
        assert dist.new_group([0, 1], use_local_synchronization=True).group_name == "by_name"

    unit = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert _torch.STATE_KEY in vars(unit)
    assert _torch.REGISTRY_KEY in vars(unit)
    for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
        assert callable(getattr(NamedParamGroup, name))


class Asked(nn.Linear):
    """A layer that looks for who reduces over its parameters, as modules in pipeline stages do."""

    def named_parameters(self, *args, **options):
        self.found = self._look()
        return super().named_parameters(*args, **options)

    def _look(self):
        return _torch.reducing_over_parameters()


def test_functions_that_reduce_over_parameters_are_named():
    module = Asked(2, 2)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert module.found == "torch.nn.utils.clip_grad.clip_grad_norm_"
    torch.optim.LBFGS(module.parameters())
    assert module.found == "torch.optim.LBFGS"
    torch.optim.SGD(module.parameters())
    assert module.found is None


def test_a_module_that_was_asked_for_parameters_is_freed():
    """Whoever looks at callers keeps none of their locals alive, so that deletion is enough."""
    gc.collect()
    gc.disable()
    try:
        module = Asked(2, 2)
        left = weakref.ref(module)
        assert len(list(module.parameters())) == 2
        del module
        assert left() is None
    finally:
        gc.enable()


def test_names_of_distributed_torch():
    run_ranks(_run_on_a_rank, 2)
