"""The module that `parallelize` returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import parts_of, share_tables
from autopar.runtime.calls.inputs import RowLoader
from autopar.runtime.calls.programs import CallPath, LoadedModel, Programs, RunnableProgram, RunnableStage
from autopar.runtime.calls.steps import forward_backward, loss_of, output_of
from autopar.runtime.fsdp.managers import FSDPManagers
from autopar.runtime.generated.bases import Container, local
from autopar.runtime.generated.random import Randomness
from autopar.runtime.generated.saving import saving
from autopar.runtime.initialization import Initializable, MissingValues
from autopar.runtime.parameters import ParameterWatch
from autopar.runtime.pipeline.running import PipelineRunner
from autopar.runtime.ranks.agreement import Agreement
from autopar.runtime.ranks.comparing import CallComparison, Surroundings
from autopar.runtime.ranks.failures import FailureReports
from autopar.runtime.refusals import (
    CalledPart,
    missing_method,
    put,
    refuse_export,
    refuse_global_hooks,
    refuse_module_hooks,
    refuse_parameter_hooks,
    refuse_partial_reduction,
    refuse_partial_state,
)
from autopar.runtime.state import axes_of, mesh_of
from autopar.runtime.whole import GradientClipping, whole_state
from passes._torch import buffers_of, parameters_of, pytree, schema_of
from passes.ir.arguments import find_overload
from passes.ir.errors import CaptureError, InputError, UnsupportedError
from passes.ir.layout import S
from passes.ir.plan import Plan

# Attributes of the module below.
_OWN = (
    "_agreement",
    "_axes",
    "_calls",
    "_clipping",
    "_comparison",
    "_deferred",
    "_device",
    "_elsewhere",
    "_evaluated",
    "_failures",
    "_loader",
    "_managers",
    "_mesh",
    "_missing",
    "_model_class",
    "_original",
    "_pipeline",
    "_plan",
    "_programs",
    "_random",
    "_refused",
    "_root",
    "_seed",
    "_watch",
)


_NO_LOSS = "the output has no loss to run backward from: pass labels, or plan with objective='train'"


class DistributedModule(Initializable, CalledPart):
    """A model that runs on a mesh as planned.

    Called with the global batch, the same on every rank, it returns what the model returns: scalars as plain tensors,
    equal on all ranks, other tensors as `DTensor` in the plan's layout. Parameters are `DTensor`s under the model's own
    names. The first call with other sizes than planned takes a moment: the plan is carried over to them.
    """

    _root: Container

    def __init__(
        self,
        root: Container,
        mesh: DeviceMesh,
        device: torch.device,
        loaded: LoadedModel,
        managers: FSDPManagers,
        pipeline: PipelineRunner | None = None,
    ) -> None:
        """`mesh` is that of this rank's stages where there is a `pipeline`."""
        super().__init__()
        plan, programs = loaded.plan, loaded.programs
        taken = sorted(set(_OWN) & {*parts_of(root), *parameters_of(root), *buffers_of(root)})
        if taken:
            raise CaptureError(f"the model has a part named {taken[0]!r}, which its distributed form needs: rename it")
        # This module shares its tables of parts, parameters and buffers with `root`, whose class has no attributes that
        # could hide a part. A parameter that is replaced in one is replaced in both.
        share_tables(self, root)
        self._axes = axes_of(mesh)
        managers.bind(root)
        self._managers = managers
        self._mesh = mesh
        self._pipeline = pipeline
        self._plan = plan
        self._seed = loaded.seed
        self._random = Randomness(loaded.seed)
        self._failures = FailureReports(plan.model)
        self._refused = loaded.refused
        self._elsewhere = loaded.elsewhere
        self._deferred = loaded.deferred
        self._missing = MissingValues(root, loaded.missing)
        self._device = device
        self._original: nn.Module | None = None
        self._model_class: type[nn.Module] | None = None
        # The parts of the model are this module's own: the container is none of them.
        object.__setattr__(self, "_root", root)
        self._programs = Programs(root, mesh, device, self._random, managers.by_stage, programs, loaded.other_sizes)
        planned = plan.parameters if plan.objective == "train" else {}
        self._watch = ParameterWatch(root, planned, self._missing.check)
        agreement = Agreement(self.mesh)
        self._agreement = agreement
        self._clipping = GradientClipping(agreement, None if pipeline is None else pipeline.ranks)
        self._comparison = self._compared(agreement)
        self._loader = RowLoader(mesh, device, agreement, mesh_of(self.mesh))
        self._calls = CallPath(
            loaded.signature, self._programs, self._watch, self._comparison, mesh, self._axes, device
        )
        self._evaluated = frozenset(part for part in self.modules() if not part.training)
        self.train("train" in programs)

    def _compared(self, agreement: Agreement) -> CallComparison:
        """The comparison of calls between ranks; its messages name the first axis that samples are split over."""
        inputs = self._programs.planned("train" if "train" in self._programs else "infer").program.inputs
        split = [
            axis for item in inputs for axis, placement in enumerate(item.layout) if placement == S(item.samples or 0)
        ]
        shape = mesh_of(self._mesh)
        return CallComparison(agreement, mesh_of(self.mesh), shape, shape.names[min(split, default=0)])

    def train(self, mode: bool = True) -> "DistributedModule":
        """Switch between training and evaluation; a module planned for inference only cannot train. Parts that were in
        evaluation mode when a model in training mode was planned stay so."""
        if mode and "train" not in self._programs:
            raise InputError("this module was planned for inference: plan it with objective='train' to train it")
        if not mode and self._refused:
            raise CaptureError(f"this module can be trained, but not evaluated: {self._refused}")
        self.training = mode
        for part in self.children():
            for inner in part.modules():
                inner.training = mode and inner not in self._evaluated
        return self

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Attributes of the module, or else of the part of a model that it stands for.

        Raises UnsupportedAttributeError, an AttributeError, for other methods and attributes of the model's class.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            original, model_class = self.__dict__.get("_original"), self.__dict__.get("_model_class")
            error = missing_method(model_class, name) if model_class is not None and original is None else None
            if error is not None:
                raise error from None
            if original is None or name.startswith("_"):
                raise
        found: Tensor | nn.Module = getattr(original, name)
        return found

    @property
    def used_parameters(self) -> frozenset[str]:
        """The parameters that any of its programs reads or changes."""
        return frozenset[str]().union(*(item.program.parameters for item in self._programs.loaded.values()))

    def take_from(self, model: nn.Module) -> None:
        """Take the configuration of `model`, if it has one, and record the attributes of its class."""
        self._model_class = type(model)
        config = getattr(model, "config", None)
        if config is not None and not hasattr(self, "config"):
            self.config = config

    def stand_for(self, original: nn.Module) -> None:
        """Stand for `original` in a model that is not distributed: return whole tensors, and have its attributes."""
        # It is no part of this module.
        object.__setattr__(self, "_original", original)
        # Its inputs are computed, and every rank may round differently.
        self._comparison.compares_floats = False

    def keep(self, path: str, part: nn.Module) -> None:
        """Keep `part`, which no program uses, as the submodule at `path`, with its own parameters."""
        put(self._root, path, part)
        self._watch.refresh()

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh that the module runs on."""
        return self._mesh if self._pipeline is None else self._pipeline.ranks.mesh

    @property
    def plan(self) -> Plan:
        """The plan: layouts, predicted time and memory, and every decision behind them."""
        return self._plan

    @property
    def random(self) -> Randomness:
        """The random generator of dropout; `random.seed(0)` on all ranks makes a run reproducible."""
        return self._random

    @property
    def code(self) -> str:
        """The generated source for the current mode (training or evaluation)."""
        return self._programs.loaded[self._mode()].program.source

    @property
    def code_path(self) -> Path:
        """The path of the file that contains `code`."""
        return self._programs.loaded[self._mode()].path

    @property
    def input_layouts(self) -> dict[str, dict[str, str]]:
        """The placement of each input on each axis: {"input_ids": {"dp": "S(0)", "tp": "R"}}."""
        return {
            item.name: {axis.name: str(part) for axis, part in zip(self._axes, item.layout, strict=True)}
            for item in self._programs.planned(self._mode()).program.inputs
        }

    def from_local(self, batch: Mapping[str, object], axes: Sequence[str] | None = None) -> dict[str, object]:
        """Each rank's own part of a batch, as data loaders give it, as arguments for a call.

        `batch` holds parts of the model's arguments by name. The result holds `DTensor`s of the whole batch:
        `dist_model(**dist_model.from_local(batch, axes=("dp",)))`. Every rank of the mesh calls it alike.

        - `axes`: the axes of the mesh that the samples are split over, the outermost first. Each rank gives its own
          rows (dim 0, or the dim in which the planned input has its samples), those of the ranks along these axes are
          put together in their order, and ranks along the other axes give the same rows. Ranks may have different
          numbers of rows, or none: then tensors without rows. A tensor without samples is the same on every rank.
        - None: each rank gives its parts in the layouts of `input_layouts`.

        The whole batch may have other sizes than planned. Raises InputError, on all ranks, for tensors of another dtype
        or number of dims than planned, for sizes that do not fit together, for a layout that parts cannot have, and for
        unknown axes.
        """
        program = self._programs.planned(self._mode()).program
        return self._loader.planned(batch, program) if axes is None else self._loader.gathered(batch, axes, program)

    def data_rank(self, axes: Sequence[str]) -> int:
        """The number of this rank's share of the data where samples are split over `axes`, the outermost first.

        A `DistributedSampler(dataset, num_replicas=dist_model.data_size(axes), rank=dist_model.data_rank(axes))` draws
        that share for `from_local(batch, axes)`. Raises InputError for unknown axes.
        """
        return self._loader.share(axes)[0]

    def data_size(self, axes: Sequence[str]) -> int:
        """The number of shares of the data where samples are split over `axes`; see `data_rank`."""
        return self._loader.share(axes)[1]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run `forward` and the hooks of the module. Raises RankFailedError where a collective fails."""
        return self._failures.run(super().__call__, *args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the plan on the global batch.

        Raises InputError for a missing or additional argument, for a tensor of another dtype or number of dims than
        planned, and for sizes that the model cannot be traced for; UnsupportedError with gradients in pipeline stages,
        and with gradients and a backward hook on all modules.
        """
        refuse_export()
        with self._comparison.telling():
            refuse_global_hooks()
            if self._pipeline is not None and self.training and torch.is_grad_enabled():
                raise UnsupportedError(
                    "a module in pipeline stages computes gradients with the forward pass: call "
                    "dist_model.forward_backward(...), or enter torch.no_grad() for the output alone"
                )
        serving, inputs = self._calls.prepared(self._program_name(args, kwargs), self._surroundings(1), args, kwargs)
        self._change(serving)
        if self._pipeline is None:
            return self._output(serving, self._run(serving.stages[0], inputs))
        with torch.no_grad(), self._random.step():
            return self._output(serving, self._pipeline.forward(serving, inputs, self._runs(serving)))

    def _runs(self, serving: RunnableProgram) -> dict[int, Callable[[Sequence[Tensor]], Sequence[object]]]:
        """The functions that run the stages of this rank."""
        return {number: partial(self._run, stage) for number, stage in serving.stages.items()}

    def _run(self, serving: RunnableStage, local_inputs: Sequence[Tensor]) -> tuple[object, ...]:
        """Run a program, or one of its stages, on this rank's parts of its inputs."""
        self._random.advance()
        serving.parameters.follow()
        program = serving.program
        differentiable = program.differentiable and torch.is_grad_enabled()
        with (
            torch.set_grad_enabled(differentiable),
            saving() if differentiable and program.regathers else nullcontext(),
        ):
            results = serving.manager.run(program.held, serving.instance.forward, local_inputs)
        return serving.parameters.linked(results) if differentiable else results

    def _output(self, serving: RunnableProgram, leaves: Sequence[object]) -> object:
        """The model's output, from this rank's parts of its leaves."""
        whole = self._original is not None or self._plan.outputs == "full"
        return output_of(serving.program, leaves, self._mesh, whole=whole)

    def forward_backward(self, *args: object, **kwargs: object) -> object:
        """Run forward and backward on the global batch: returns the output with the loss, and adds to `.grad`.

        The batch goes through the planned number of micro-batches, whose losses and gradients add up to those of the
        whole batch; then the output is without gradient. A batch of another size is cut into as many. Where
        these do not divide it, it is cut into another number, with a warning.

        In pipeline stages it is the only way to gradients. Then the output's tensors with dims are None on the ranks of
        other stages than the one that computes them, unless the plan has `outputs="full"`; the loss is on all.

        Raises InputError if the output has no loss, and within `torch.no_grad()`; where there are micro-batches,
        UnsupportedError for hooks on this module, which they run without, and for hooks on its parameters, which would
        see the gradients of some of them; and what a call raises.
        """
        return self._failures.run(self._forward_backward, *args, **kwargs)

    def _forward_backward(self, *args: object, **kwargs: object) -> object:
        batching = self._programs.planned(self._mode()).program.micro_batches
        if batching is not None:
            with self._comparison.telling():
                refuse_global_hooks()
                refuse_module_hooks(self)
                refuse_parameter_hooks(self._watch.named())
                if not torch.is_grad_enabled():
                    raise InputError(
                        "forward_backward computes gradients: call it without torch.no_grad() and inference mode"
                    )
            return self._in_micro_batches(
                *self._calls.prepared(self._mode(), self._surroundings(batching.count), args, kwargs)
            )
        output = self(*args, **kwargs)
        loss = loss_of(output)
        if loss is None or not loss.requires_grad:
            raise InputError(_NO_LOSS)
        loss.backward()  # type: ignore[no-untyped-call]
        return output

    def _in_micro_batches(self, serving: RunnableProgram, inputs: Sequence[Tensor]) -> object:
        """Forward and backward of a batch in the micro-batches of the program that serves it."""
        batching = serving.program.micro_batches
        if batching is None:
            raise InputError(_NO_LOSS)
        self._change(serving)
        if self._pipeline is not None:
            keeping = self._managers.keeping_parameters() if batching.gather_once else nullcontext()
            with keeping, self._random.step():
                leaves = self._pipeline.forward_backward(serving, inputs, self._runs(serving), batching)
            return self._output(serving, leaves)
        leaves = forward_backward(
            batching,
            inputs,
            self._mesh,
            serving.totals,
            partial(self._run, serving.stages[0]),
            self._managers,
        )
        return self._output(serving, leaves)

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers as whole plain tensors on the CPU, under the names of the stock model.

        The first rank of the mesh has them, those of all pipeline stages; the other ranks get an empty dict. Every rank
        calls it: `state = dist_model.full_state_dict()`. Then the first rank writes a folder that `from_pretrained`
        loads, `stock_model.save_pretrained(folder, state_dict=state)`. Of torch's `get_model_state_dict` a rank gets
        the parameters of its own stages alone.
        """
        ranks = None if self._pipeline is None else self._pipeline.ranks
        state = {name: item for name, item in self.state_dict(keep_vars=True).items() if isinstance(item, Tensor)}
        return self._failures.run(partial(whole_state, state, self.mesh, self._agreement, ranks))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """See `autopar.clip_grad_norm_`."""
        elsewhere = frozenset[str]() if self._pipeline is None else self._pipeline.shared.counted_elsewhere
        parameters = dict(self.named_parameters())
        return self._failures.run(self._clipping.clip, parameters, elsewhere, (max_norm, norm_type), error_if_nonfinite)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank by name: in pipeline stages those of its own."""
        if self._pipeline is not None:
            refuse_partial_state()
            refuse_partial_reduction()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def holding_gradients(self) -> AbstractContextManager[None]:
        """Context in which backward passes accumulate gradients of parameters on data axes without reducing them.

        The first backward pass afterwards reduces the sum: enter it around the backward passes of all micro-batches but
        the last. Until then `.grad` is a `DTensor` that is `Partial` on these axes, which can be zeroed, scaled and
        clipped like any other. Parameters whose gradients the generated code reduces are not affected. It may be
        entered within itself.

        The backward pass raises InputError for a parameter on data axes that has a tensor hook.
        """
        return self._managers.holding_gradients()

    def keeping_parameters(self) -> AbstractContextManager[None]:
        """Context in which parameters that stay gathered for backward also stay gathered after it.

        Enter it around all micro-batches of a step. Parameters must not change inside.
        """
        return self._managers.keeping_parameters()

    def _change(self, serving: RunnableProgram) -> None:
        """Apply the changes to parameters that the model itself makes before it reads them."""
        changes = {change.parameter: change for stage in serving.stages.values() for change in stage.program.changes}
        for change in changes.values():
            part = local(self._root.get_parameter(change.parameter).detach())
            first, *_ = schema_of(find_overload(change.target)).arguments
            with torch.no_grad():
                find_overload(change.target)(**{first.name: part.data}, **change.arguments)

    def _surroundings(self, micro_batches: int) -> Surroundings:
        return Surroundings(self.training, micro_batches, self._random, self._managers.within, self._mesh.device_type)

    def _mode(self) -> str:
        """The name of the program that runs: evaluation has its own only where it differs from training."""
        return "train" if self.training or "infer" not in self._programs else "infer"

    def _program_name(self, *given: object) -> str:
        """The name of the program whose decisions serve a call with the arguments `given`: that of training wherever
        gradients are computed, but in pipeline stages."""
        mode = self._mode()
        if "train" not in self._programs or self._pipeline is not None or not torch.is_grad_enabled():
            return mode
        tensors = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return "train" if any(item.requires_grad for item in (*self.parameters(), *tensors)) else mode
