"""Compare a parallelized model with the model itself, on this machine: for our tests, and for users' CI."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isnan, prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from autopar._torch import pickled_state
from autopar.api import parallelize
from autopar.models import huggingface
from autopar.models.losses import Loss, with_loss
from autopar.options import OBJECTIVES
from autopar.testing.errors import (
    buffer_errors,
    gradient_errors,
    largest_element,
    leaves_of,
    output_errors,
    scalars_of,
    whole_tensor,
)
from autopar.testing.randomness import RandomOps, WithoutDropout
from autopar.testing.ranks import RankError, preload, run_ranks
from passes._torch import pytree
from passes.capture import as_one_process
from passes.cost.cluster import Cluster
from passes.ir.errors import InputError, UnsupportedError
from passes.ir.leaves import map_leaves

__all__ = [
    "Comparison",
    "LiftFloat32",
    "RankError",
    "assert_equivalent",
    "compare",
    "compare_on_mesh",
    "preload",
    "random_inputs",
    "run_ranks",
]

# Tolerance for float32 inside a float64 model.
_FLOAT32_TOLERANCE = 1e-4


# Functions whose tensors have the default dtype if none is given.
_OF_DEFAULT_DTYPE = frozenset({torch.zeros, torch.ones, torch.empty, torch.eye})


class LiftFloat32(TorchFunctionMode):
    """Mode that turns casts to float32 into casts to `dtype`, and makes tensors of `dtype` that would be float32 by
    default, so that all of a model is computed equally exactly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if str(given.get("device")) == "meta":
            # Tracing makes an image of a tensor that exists, whose dtype is what it is.
            return function(*args, **given)
        if function is torch.Tensor.float:
            function, args = torch.Tensor.to, (args[0], self.dtype)
        if function in _OF_DEFAULT_DTYPE and given.get("dtype") is None and given.get("out") is None:
            given["dtype"] = torch.get_default_dtype()
        lifted = tuple(self._lift(item) for item in args)
        return function(*lifted, **{name: self._lift(item) for name, item in given.items()})

    def _lift(self, item: object) -> object:
        return self.dtype if item is torch.float32 else item


@dataclass(frozen=True)
class Comparison:
    """Errors of all tensors by name: outputs under "output ...", buffers afterwards under "buffer ...", gradients under
    "gradient of ...".

    An error is max|a - b| / max(max|b|, 1e-5 x the model's largest gradient) of the parallelized a and the model's
    own b (in float64); for buffers that a call updates the largest of those. It is NaN where b has NaN.
    """

    errors: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor with the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))

    @property
    def defined(self) -> dict[str, float]:
        """The errors of tensors that are numbers on one device."""
        return {name: error for name, error in self.errors.items() if not isnan(error)}

    def __str__(self) -> str:
        name, error = self.worst
        return f"worst of {len(self.errors)} tensors: {name} with relative error {error:.2e}"


def assert_equivalent(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    mesh: Mapping[str, int] | None = None,
    example_inputs: Mapping[str, object] | tuple[object, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
    device_type: str = "cpu",
    **options: object,
) -> Comparison:
    """Compare a model with its parallelized self: outputs, loss, and the gradient of every parameter.

    Ranks on this machine run it on `mesh` (by default {"dp": 2, "tp": 2}), in `dtype`, on devices of `device_type`
    (see `run_ranks`). What the model casts to float32 is lifted to `dtype` on both sides; a second comparison leaves
    these casts and uses float32 tolerances. `options` go to `autopar.parallelize`; without a cluster among them links
    cost nothing ("ideal"), so that all is split that can be. Without `example_inputs` a Hugging Face model gets random
    ones. Prints the worst tensor, and returns the (first) comparison.

    A model in evaluation (`model.eval()`) is compared in evaluation; in pipeline stages its gradients are not
    compared. Dropout is off on both sides in any case.

    Raises AssertionError where a tensor is off by more than `rtol`, or is there on one side only, and where it is NaN
    on one device; with float32 inside such tensors are named and left out. Raises UnsupportedError, which names the
    ops, for a model that draws random numbers otherwise; InputError for one on meta, and for one that cannot be
    pickled.
    """
    sizes = dict(mesh or {"dp": 2, "tp": 2})
    model = model_or_factory if isinstance(model_or_factory, nn.Module) else model_or_factory()
    empty = next((name for name, item in (*model.named_parameters(), *model.named_buffers()) if item.is_meta), None)
    if empty is not None:
        raise InputError(f"{empty!r} is on meta, without values to compare: give a model that is on a device")
    options = {"cluster": "ideal", **options}
    objective = str(options.get("objective", "train"))
    given = random_inputs(model, objective, prod(sizes.values())) if example_inputs is None else example_inputs
    inputs = dict(inspect.signature(model.forward).bind(*given).arguments if isinstance(given, tuple) else given)
    _refuse_random(_model_in(model, dtype), _cast(inputs, dtype), objective, options)
    comparisons: list[Comparison] = []
    for lifted, tolerance in ((True, rtol), (False, max(rtol, _FLOAT32_TOLERANCE))):
        comparison = compare(model, sizes, inputs, dtype, lifted=lifted, device_type=device_type, **options)
        print(f"{type(model).__name__} on {sizes}{'' if lifted else ', float32 inside'}: {comparison}")
        comparisons.append(comparison)
        undefined = [name for name, error in comparison.errors.items() if isnan(error)]
        if undefined and lifted:
            raise AssertionError(
                f"{type(model).__name__} on one device gives NaN for {undefined[0]}: there is nothing to compare, give "
                "other inputs"
            )
        if undefined:
            print(f"  left out, because it is NaN on one device: {', '.join(undefined)}")
        name, error = replace(comparison, errors=comparison.defined).worst
        if not error <= tolerance:
            raise AssertionError(
                f"{type(model).__name__} on {sizes} is not what it is on one device"
                f"{'' if lifted else ' (float32 inside)'}: {name} has relative error {error:.3e}, "
                f"allowed are {tolerance:.1e}"
            )
    return comparisons[0]


def compare(
    model: nn.Module,
    mesh: Mapping[str, int],
    inputs: Mapping[str, object],
    dtype: torch.dtype = torch.float64,
    *,
    lifted: bool = True,
    device_type: str = "cpu",
    **options: object,
) -> Comparison:
    """Run `model` and its parallelized self on ranks of this machine, without dropout, and return all errors; the ranks
    have devices of `device_type` (see `run_ranks`).

    A model in evaluation is compared in evaluation. With `lifted` what the model casts to float32 is lifted to `dtype`
    on both sides.
    """
    model, inputs = _model_in(model, dtype), _cast(inputs, dtype)
    stream = io.BytesIO()
    try:
        torch.save((model, inputs), stream, pickle_module=_Pickling)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"{type(model).__name__} cannot be pickled for the ranks ({error}): give one without local functions, as "
            "are the hooks that some models get when they run"
        ) from error
    lift = dtype if lifted else None
    given = stream.getvalue(), dict(mesh), lift, device_type, options
    return run_ranks(_compare_on_rank, prod(mesh.values()), *given, device_type=device_type)[0]


class _Pickling:
    """pickle, for modules with parametrized weights too, which cannot be pickled as they are."""

    class Pickler(pickle.Pickler):
        """Pickles their parametrizations apart."""

        def reducer_override(self, item: Any) -> Any:
            """Pickle a module with parametrizations; everything else as by default."""
            if not (isinstance(item, nn.Module) and parametrize.is_parametrized(item)):
                return NotImplemented
            parametrizations = {name: list(found) for name, found in cast(Any, item.parametrizations).items()}
            weights = {name: nn.Parameter(getattr(item, name).detach()) for name in parametrizations}
            parts = {name: part for name, part in item.named_children() if name != "parametrizations"}
            return _parametrized, (
                parametrize.type_before_parametrizations(item),
                pickled_state(item, parts, weights),
                parametrizations,
                item.state_dict(),
            )


def _parametrized(
    kind: type[nn.Module],
    state: Mapping[str, Any],
    parametrizations: Mapping[str, list[nn.Module]],
    values: Mapping[str, Tensor],
) -> nn.Module:
    """A module with its parametrizations registered."""
    module = kind.__new__(kind)
    vars(module).update(state)
    for name, found in parametrizations.items():
        for parametrization in found:
            parametrize.register_parametrization(module, name, parametrization)
    module.load_state_dict(values)
    return module


def _with_loss(model: nn.Module, options: Mapping[str, object]) -> nn.Module:
    """The model with the loss outside of it that is among the options, if any is."""
    return with_loss(model, cast(Loss | None, options.get("loss")))


def random_inputs(model: nn.Module, objective: str, batch: int, length: int = 16) -> dict[str, object]:
    """Random inputs for a Hugging Face model; some labels are ignored, in some samples more than in others."""
    assert objective in OBJECTIVES
    generator = torch.Generator().manual_seed(0)
    inputs = huggingface.made_inputs(model, objective, batch)
    config = cast(huggingface.Pretrained, model).config
    filled: dict[str, object] = {}
    for name, leaf in inputs.items():
        assert isinstance(leaf, Tensor)
        shape = (leaf.shape[0], min(length, leaf.shape[1])) if leaf.dim() == 2 else tuple(leaf.shape)
        if leaf.is_floating_point():
            filled[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            classes = config.vocab_size if leaf.dim() == 2 else getattr(config, "num_labels", 2)
            filled[name] = torch.randint(0, classes, shape, generator=generator)
    labels = filled.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 2:
        for sample in range(labels.shape[0]):
            labels[sample, : sample % labels.shape[1]] = -100
    return filled


def _cast(inputs: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """The inputs with floating and complex tensors in `dtype`."""
    return map_leaves(inputs, lambda _, leaf: _in(leaf, dtype) if isinstance(leaf, Tensor) else leaf)


def _model_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model with floating parameters and buffers in `dtype`. `Module.to` would cast complex ones, too."""
    copied = copy.deepcopy(model)
    for tensor in (*copied.parameters(), *copied.buffers()):
        tensor.data = _in(tensor.data, dtype)
    return copied


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in `dtype`, a complex one in the complex dtype of it."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _compare_on_rank(
    payload: bytes,
    mesh: Mapping[str, int],
    lifted: torch.dtype | None,
    device_type: str,
    options: Mapping[str, object],
) -> Comparison:
    """Compare the models on one rank."""
    model, inputs = torch.load(io.BytesIO(payload), map_location=device_type, weights_only=False)
    _known_to_transformers(model)
    device_mesh = init_device_mesh(device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return compare_on_mesh(model, device_mesh, inputs, lifted, **options)


def _known_to_transformers(model: nn.Module) -> None:
    """transformers learns what a class can record (hidden states, …) when one is made, and unpickling makes none."""
    for module in model.modules():
        if huggingface.is_huggingface(module):
            with torch.device("meta"):
                type(module)(cast(huggingface.Pretrained, module).config)
            return


def compare_on_mesh(
    model: nn.Module,
    mesh: DeviceMesh | int | Cluster,
    inputs: Mapping[str, object],
    lifted: torch.dtype | None = None,
    **options: object,
) -> Comparison:
    """Run `model` and its parallelized self in this process group and return all errors; every rank calls it alike.

    A model in evaluation is compared in evaluation; micro-batches are used where they are planned. Casts to float32 in
    the model go to `lifted`. Gradients are left in the model.
    """
    objective = str(options.get("objective", "train"))
    training = objective == "train" and model.training
    with _comparable(lifted):
        distributed = parallelize(model, mesh, dict(inputs), **options)  # type: ignore[arg-type]
    for part in huggingface.pretrained_parts(model):
        # What is computed again in the backward pass is not lifted there.
        cast(huggingface.Pretrained, part).gradient_checkpointing_disable()
    model = _with_loss(model, options)
    settings = _settings(model, inputs, objective)
    if not training:
        model.eval()
    distributed.train(training)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    quiet = huggingface.without_inner_caches(model, objective)
    with _comparable(lifted), quiet, as_one_process(model), torch.set_grad_enabled(objective == "train"):
        expected = model(**inputs, **settings)
    in_stages = bool(distributed.plan.pipeline_axis)
    in_parts = training and (in_stages or distributed.plan.programs[objective].micro_batches > 1)
    with _comparable(None):
        got = distributed.forward_backward(**inputs) if in_parts else distributed(**inputs)
    theirs, ours = leaves_of(expected), leaves_of(got)
    if distributed.plan.outputs == "scalars":
        theirs, ours = scalars_of(theirs), scalars_of(ours)
    errors = dict(output_errors(ours, theirs, in_stages))
    errors.update(buffer_errors(distributed, model, before, in_stages))
    leaves = [leaf for leaf in pytree.tree_leaves(got) if isinstance(leaf, Tensor)]
    if training or (objective == "train" and any(leaf.requires_grad for leaf in leaves)):
        if not in_parts:
            _backward(got, only_loss=False)
        made = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, Tensor) and leaf.requires_grad]
        # Gradients of parameters are sums over those of outputs, which may cancel.
        addends = [leaf for leaf in made if leaf.dim() and leaf.numel()]
        for leaf in addends:
            leaf.retain_grad()
        _backward(expected, only_loss=in_parts)
        largest = largest_element(*(leaf.grad for leaf in addends), *(item.grad for item in model.parameters()))
        errors.update(gradient_errors(distributed, model, in_stages, largest))
    return Comparison(_of_all_ranks(errors, theirs, expected, model) if in_stages else errors)


def _of_all_ranks(
    errors: Mapping[str, float], leaves: Mapping[str, object], expected: object, model: nn.Module
) -> dict[str, float]:
    """The errors of all ranks, the largest of each tensor; infinite for what no rank has of the `leaves` of the output,
    the buffers and gradients."""
    found: list[Mapping[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, dict(errors))
    merged: dict[str, float] = {}
    for own in found:
        for name, error in own.items():
            worse = not error <= merged.get(name, 0.0)
            merged[name] = error if worse else merged.get(name, 0.0)
    wanted = [f"output {path}" for path in leaves]
    wanted += [f"buffer {name}" for name, _ in model.named_buffers()]
    if any(name.startswith("gradient of ") for name in merged):
        wanted += [f"gradient of {name}" for name, _ in model.named_parameters()]
    # Objects that are made of tensors of several stages, as caches, are None on every rank.
    parts, _ = pytree.tree_flatten_with_path(
        expected, is_leaf=lambda item: item is not expected and type(item) not in pytree.BUILTIN_TYPES
    )
    objects = tuple(f"output {pytree.keystr(path)}[" for path, item in parts if not isinstance(item, Tensor))
    wanted = [name for name in wanted if name in merged or not name.startswith(objects)]
    return {name: merged.get(name, float("inf")) for name in dict.fromkeys([*wanted, *merged])}


def _settings(model: nn.Module, inputs: Mapping[str, object], objective: str) -> Mapping[str, object]:
    """Further arguments that a model of Hugging Face is called with when it is traced."""
    huggingface.register_caches(model)
    if not huggingface.is_huggingface(model):
        return {}
    return huggingface.settings(inspect.signature(model.forward), inputs, objective)


def _refuse_random(
    model: nn.Module, inputs: Mapping[str, object], objective: str, options: Mapping[str, object]
) -> None:
    """Raise UnsupportedError if `model`, which is changed, draws random numbers for anything but dropout."""
    if not (objective == "train" and model.training):
        model.eval()
    whole = _with_loss(model, options)
    with _comparable(None), torch.no_grad(), RandomOps() as random:
        whole(**inputs, **_settings(whole, inputs, objective))
    if random.found:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be compared with itself, because it draws random numbers: "
            f"{', '.join(random.found)}; switch that off, as dropout is"
        )


@contextmanager
def _comparable(lifted: torch.dtype | None) -> Iterator[None]:
    """Within, dropout is off, and what a model casts to float32 is lifted to `lifted`."""
    with WithoutDropout(), nullcontext() if lifted is None else LiftFloat32(lifted):
        yield


def _backward(output: object, *, only_loss: bool) -> None:
    """From the loss, or from a fixed weighting of all outputs where there is none that has a gradient. With `only_loss`
    a scalar that is the only one is the loss, as `forward_backward` has it."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = [leaf for leaf in leaves_of(output).values() if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    scalars = [leaf for leaf in leaves if not leaf.dim()]
    if only_loss and not isinstance(loss, Tensor) and len(scalars) == 1:
        loss = scalars[0]
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        generator = torch.Generator().manual_seed(0)
        weighted = (
            (whole * torch.randn(whole.shape, generator=generator, dtype=whole.dtype).to(whole.device)).sum()
            for whole in map(whole_tensor, leaves)
        )
        loss = sum(weighted, torch.zeros(()))
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
