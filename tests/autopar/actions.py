"""Random sequences of what users do with a model in training, done to a distributed module and to the stock model.

A seed draws the same model, mesh, options and actions on every rank. After each action, gradients, parameters and
buffers are held against those of the stock model, in float64.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime import DistributedModule
from autopar.testing import LiftFloat32
from tests.architectures import ARCHITECTURES
from tests.autopar.test_training import whole
from tests.models import gemma2, gpt2, gpt_oss, llama, mistral, phi3, qwen3, t5

# Errors are relative to the largest value of all tensors of a kind.
TOLERANCE = 1e-9

Batch = dict[str, Any]
Loss = Callable[[Any, Tensor], Tensor]
Optimizers = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """A model, and a batch of so many samples, for a length and a seed; `lengths` are those it may have. One that makes
    the inputs of its decoder from labels `needs_labels` in evaluation, too."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    lengths: Sequence[int] = (16,)
    needs_labels: bool = False


def _texts(make: Callable[[], nn.Module], needs_labels: bool = False) -> Recipe:
    def batch(rows: int, length: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 64, (rows, length), generator=generator)
        ignored = torch.rand(rows, length, generator=generator) < 0.2
        ignored[0, -1] = False
        return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}

    return Recipe(make, batch, (16, 16, 16, 12, 9), needs_labels)


def _small(name: str) -> Recipe:
    """An architecture in small: its batches differ in their number of samples alone."""
    architecture = ARCHITECTURES[name]

    def batch(rows: int, _: int, __: int) -> Batch:
        return {
            name: item.double() if isinstance(item, Tensor) and item.is_floating_point() else item
            for name, item in architecture.inputs(rows).items()
        }

    return Recipe(architecture.make, batch, needs_labels=name in ("t5", "whisper"))


class Normed(nn.Module):
    """A convolution and normalization over the batch, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """x: [batch, 3, 8, 8]; target: [batch]."""
        features = self.norm(self.convolution(x)).relu().mean((-1, -2))
        scores = self.out(self.inner(features).relu())
        return {"loss": nn.functional.cross_entropy(scores, target), "scores": scores}


def _pictures(rows: int, _: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "target": torch.randint(0, 5, (rows,), generator=generator)}


RECIPES: Mapping[str, Recipe] = {
    **{name: _small(name) for name in ARCHITECTURES},
    "llama": _texts(llama),
    "tied llama": _texts(partial(llama, tie_word_embeddings=True)),
    "deep llama": _texts(partial(llama, num_hidden_layers=4)),
    "qwen3": _texts(qwen3),
    "mistral": _texts(mistral),
    "gpt2": _texts(gpt2),
    "gemma2": _texts(gemma2),
    "gpt_oss": _texts(gpt_oss),
    "phi3": _texts(phi3),
    "t5": _texts(t5, needs_labels=True),
    "normed": Recipe(Normed, _pictures),
}

MESHES: Mapping[str, Mapping[str, int]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "2d": {"dp": 2, "tp": 2},
    "3d": {"dp": 2, "cp": 2, "tp": 2},
    "cp": {"cp": 2},
    "dp cp": {"dp": 2, "cp": 2},
    "pp cp": {"pp": 2, "cp": 2},
    "pp": {"pp": 2},
    "pp4": {"pp": 4},
    "pp 2d": {"pp": 2, "dp": 2},
    "pp tp": {"pp": 2, "tp": 2},
}

OPTIMIZERS: Sequence[Optimizers] = (
    partial(torch.optim.AdamW, lr=1e-3),
    partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, foreach=False),
    partial(torch.optim.AdamW, lr=1e-3, fused=True),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    partial(torch.optim.SGD, lr=1e-2),
    partial(torch.optim.RMSprop, lr=1e-4, momentum=0.5),
    partial(torch.optim.NAdam, lr=1e-3),
)


def loss_of(output: Any) -> Tensor:
    """The loss in an output of either model."""
    loss: Tensor = output[0] if isinstance(output, tuple) else output["loss"]
    return loss


@dataclass
class Side:
    """One of the two models, with its optimizer."""

    model: nn.Module
    loss: Loss | None
    optimizer: torch.optim.Optimizer = field(init=False)

    def output(self, batch: Batch) -> Any:
        """The output of the model; with a loss of its own a pair of the loss and the output."""
        if isinstance(self.model, DistributedModule) or self.loss is None:
            return self.model(**batch)
        output = self.model(**batch)
        return self.loss(output, batch["labels"]) if "labels" in batch else None, output

    def scored(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return loss_of(self.output(batch))

    def forward_backward(self, batch: Batch) -> Tensor:
        """Forward and backward; the loss."""
        if isinstance(self.model, DistributedModule):
            return loss_of(self.model.forward_backward(**batch)).detach()
        loss = self.scored(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def clip(self, norm: float) -> Tensor:
        """Clip the gradients; the norm before."""
        if isinstance(self.model, DistributedModule):
            return self.model.clip_grad_norm_(norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def named(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The parameters of these names that are on this rank."""
        every = dict(self.model.named_parameters())
        return [every[name] for name in names if name in every]


@dataclass
class Pair:
    """A distributed module and the stock model, and what decides on the next action."""

    choose: random.Random
    recipe: Recipe
    options: Mapping[str, Any]
    axes: Mapping[str, int]
    ours: Side
    stock: Side
    rows: int
    frozen: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    make_optimizer: Optimizers = OPTIMIZERS[0]

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both, ours first."""
        return self.ours, self.stock

    @property
    def staged(self) -> bool:
        """Whether there is a pipeline."""
        return "pp" in self.axes

    @property
    def holds(self) -> bool:
        """Whether gradients of ours are held back."""
        gradients = (item.grad for item in self.ours.model.parameters())
        return any(
            isinstance(item, DTensor) and any(part.is_partial() for part in item.placements) for item in gradients
        )

    @property
    def cut(self) -> bool:
        """Whether a batch goes through micro-batches."""
        return self.staged or self.options["micro_batches"] > 1

    def batch(self, *, other: float = 0.4) -> Batch:
        """A batch, of another size than planned with a probability of `other`."""
        rows, length = self.rows, self.recipe.lengths[0]
        if self.choose.random() < other:
            rows, length = self.choose.choice((1, 2, 3, 4, 6, 8)), self.choose.choice(self.recipe.lengths)
            if self.recipe is RECIPES["normed"]:
                rows = max(rows, 2)
        return self.recipe.batch(rows, length, self.choose.randrange(1 << 20))

    def compare(self, what: str, ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> None:
        """Note where tensors differ; ours may be those of a few stages."""
        largest = max((float(item.abs().max()) for item in theirs.values() if item is not None), default=0.0) or 1.0
        for name, item in ours.items():
            other = theirs[name]
            if item is None or other is None:
                if item is not other:
                    self.found.append(f"{what} {name}: {item is None} {other is None}")
            elif item.shape != other.shape:
                self.found.append(f"{what} {name}: {tuple(item.shape)} {tuple(other.shape)}")
            elif item.numel() and not float((item - other).abs().max()) <= TOLERANCE * largest:
                self.found.append(f"{what} {name}: {float((item - other).abs().max()) / largest:.1e}")

    @torch.no_grad()
    def check(self) -> None:
        """Compare gradients, parameters, what trains, and buffers."""
        ours, theirs = (dict(side.model.named_parameters()) for side in self.sides)
        if set(ours) != set(theirs) and not (self.staged and set(ours) < set(theirs)):
            self.found.append(f"names {sorted(set(ours) ^ set(theirs))}")
            return
        found = [
            {name: None if every[name].grad is None else whole(every[name].grad) for name in ours}  # type: ignore[arg-type]
            for every in (ours, theirs)
        ]
        self.compare("gradient", *found)
        self.compare("value", *({name: whole(every[name]) for name in ours} for every in (ours, theirs)))
        self.found += [f"trains {name}" for name in ours if ours[name].requires_grad != theirs[name].requires_grad]
        mine = {name: whole(item) for name, item in self.ours.model.named_buffers() if item.is_floating_point()}
        self.compare("buffer", mine, {name: whole(item) for name, item in self.stock.model.named_buffers()})

    def optimize(self) -> None:
        """Give both a new optimizer."""
        self.make_optimizer = self.choose.choice(OPTIMIZERS)
        for side in self.sides:
            side.optimizer = self.make_optimizer(side.model.parameters())

    def zero(self) -> None:
        """Zero gradients, in one of the ways there are."""
        to_none, by_model = self.choose.random() < 0.8, self.choose.random() < 0.5
        for side in self.sides:
            (side.model if by_model else side.optimizer).zero_grad(set_to_none=to_none)

    def step(self) -> None:
        """A step of the optimizers, after clipping perhaps."""
        if self.choose.random() < 0.5:
            norms = [side.clip(0.5) for side in self.sides]
            self.compare("norm", *({"": whole(norm)} for norm in norms))
        for side in self.sides:
            side.optimizer.step()
        if self.choose.random() < 0.9:
            self.zero()

    def train_on(self, batch: Batch, given: Batch | None = None) -> None:
        """Forward and backward of both, of ours on the `given` form of the batch; nothing where the schedule of a
        pipeline runs no number of micro-batches that divides it."""
        try:
            loss = self.ours.forward_backward(batch if given is None else given)
        except autopar.InputError as error:
            if "that the schedule" not in str(error):
                raise
            return
        self.compare("loss", {"": loss}, {"": self.stock.forward_backward(batch)})


# --- actions ----------------------------------------------------------------------------------------------------------


def one_step(pair: Pair) -> None:
    """A step of training."""
    pair.train_on(pair.batch())
    pair.step()


def accumulate(pair: Pair) -> None:
    """A step on several batches, whose gradients are held back or not."""
    assert isinstance(pair.ours.model, DistributedModule)
    count, holds = pair.choose.randint(2, 3), pair.choose.random() < 0.7
    for number in range(count):
        last = number == count - 1 and pair.choose.random() < 0.8
        with pair.ours.model.holding_gradients() if holds and not last else nullcontext():
            pair.train_on(pair.batch())
            if pair.choose.random() < 0.2:
                pair.check()
            if pair.choose.random() < 0.1:
                pair.zero()
    if pair.choose.random() < 0.8:
        pair.step()


def evaluate(pair: Pair) -> None:
    """Evaluation, with labels or without."""
    batch = pair.batch()
    if pair.choose.random() < 0.4 and not pair.recipe.needs_labels:
        batch = {name: item for name, item in batch.items() if name != "labels"}
    mode = pair.choose.choice((torch.no_grad, torch.inference_mode))
    trains = pair.choose.random() < 0.2
    outputs = []
    for side in pair.sides:
        side.model.train(trains)
        with mode():
            output = side.output(batch)
            outputs.append(output[1] if isinstance(output, tuple) else output)
        side.model.train()
    for name in ("loss", "logits", "scores"):
        ours, theirs = (output.get(name) for output in outputs)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            pair.compare("output", {name: whole(ours)}, {name: theirs.detach()})
        elif ours is not None or (theirs is not None and not pair.staged):
            pair.found.append(f"output {name}: {type(ours)} {type(theirs)}")


def two_graphs(pair: Pair) -> None:
    """Two forward passes before the backward passes, in any order or at once."""
    if pair.staged:
        return
    first, second = pair.batch(), pair.batch()
    way = pair.choose.choice(("in order", "reversed", "at once", "twice", "dropped"))
    for side in pair.sides:
        losses = [side.scored(batch) for batch in (first, second)]
        if way == "at once":
            (losses[0] * 0.3 + losses[1]).backward()
        elif way == "twice":
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            losses[0].backward()
        elif way == "dropped":
            losses.pop(0)
            losses[0].backward()
        else:
            for loss in losses if way == "in order" else reversed(losses):
                loss.backward()
    if pair.choose.random() < 0.5:
        pair.step()


def asked_gradients(pair: Pair) -> None:
    """`torch.autograd.grad` for some parameters."""
    if pair.staged:
        return
    batch = pair.batch()
    trained = [name for name, item in pair.stock.model.named_parameters() if item.requires_grad]
    names = pair.choose.sample(trained, min(3, len(trained)))
    found = []
    for side in pair.sides:
        loss = side.scored(batch)
        try:
            gradients = torch.autograd.grad(loss, side.named(names), allow_unused=True)
        except autopar.InputError as error:
            if "which lies in an FSDP unit" not in str(error):
                raise
            pair.zero()
            return
        found.append({name: None if item is None else whole(item) for name, item in zip(names, gradients, strict=True)})
    pair.compare("asked", *found)


def freeze(pair: Pair) -> None:
    """Freeze or unfreeze parameters; those that were frozen when planned stay so."""
    if pair.frozen:
        names, trains = pair.frozen, True
        pair.frozen = []
    else:
        every = [name for name, item in pair.stock.model.named_parameters() if item.requires_grad]
        names, trains = pair.choose.sample(every, max(1, len(every) // 4)), False
        pair.frozen = names
    for side in pair.sides:
        for item in side.named(names):
            item.requires_grad_(trains)


def edit_gradients(pair: Pair) -> None:
    """Gradients that are there are scaled, clipped by value, dropped or replaced."""
    way = pair.choose.choice(("scale", "clip", "drop", "zeros", "negate"))
    trained = [name for name, item in pair.stock.model.named_parameters() if item.grad is not None]
    names = pair.choose.sample(trained, len(trained) // 2)
    # Of gradients that are held back each rank would clip its own terms.
    if way == "clip" and pair.holds:
        return
    for side in pair.sides:
        for item in side.named(names):
            assert item.grad is not None
            if way == "scale":
                item.grad.mul_(0.5)
            elif way == "clip":
                nn.utils.clip_grad_value_([item], 1e-3, foreach=False)
            elif way == "drop":
                item.grad = None
            elif way == "zeros":
                item.grad = torch.zeros_like(item)
            else:
                item.grad = -item.grad


def edit_values(pair: Pair) -> None:
    """Parameters are changed in place, or averaged with older values."""
    way = pair.choose.choice(("scale", "data", "average", "copy"))
    for side in pair.sides:
        parameters = list(side.model.parameters())
        before = [item.detach().clone() for item in parameters]
        if way == "average":
            side.optimizer.step()
        with torch.no_grad():
            for item, old in zip(parameters, before, strict=True):
                if way == "scale":
                    item.mul_(0.99)
                elif way == "data":
                    item.data.mul_(1.01)
                elif way == "average":
                    item.lerp_(old, 0.5)
                else:
                    item.copy_(old * 0.98)


def state_dicts(pair: Pair) -> None:
    """States are saved and loaded."""
    way = pair.choose.choice(("own", "stock", "full", "optimizer", "checkpoint"))
    ours, stock = pair.ours, pair.stock
    assert isinstance(ours.model, DistributedModule)
    if way == "own":
        saved = {name: item.clone() for name, item in ours.model.state_dict().items()}
        with torch.no_grad():
            for item in ours.model.parameters():
                item.zero_()
        ours.model.load_state_dict(saved)
    elif way == "stock":
        with torch.no_grad():
            for side in pair.sides:
                for item in side.model.parameters():
                    item.mul_(0.9)
        saved = {name: item.clone() for name, item in stock.model.state_dict().items()}
        ours.model.load_state_dict(saved)
    elif way == "full":
        full = ours.model.full_state_dict()
        if dist.get_rank() == 0:
            theirs = {name: item for name, item in stock.model.state_dict().items() if item.is_floating_point()}
            pair.compare("full state", {name: full[name] for name in theirs}, theirs)
    elif way == "optimizer":
        for side in pair.sides:
            saved_state = side.optimizer.state_dict()
            side.optimizer = pair.make_optimizer(side.model.parameters())
            side.optimizer.load_state_dict(saved_state)
    elif not pair.holds:
        for side in pair.sides:
            state = checkpoints.get_model_state_dict(side.model)
            checkpoints.set_model_state_dict(side.model, state)


def new_optimizer(pair: Pair) -> None:
    """Another optimizer."""
    pair.optimize()


def own_rows(pair: Pair) -> None:
    """Each rank gives its own rows, which may be of different numbers."""
    axes = tuple(axis for axis in ("dp", "cp") if axis in pair.axes)
    if not axes:
        return
    assert isinstance(pair.ours.model, DistributedModule)
    batch = pair.batch()
    tensors = {name: item for name, item in batch.items() if isinstance(item, Tensor)}
    rows = next(iter(tensors.values())).shape[0]
    size, rank = pair.ours.model.data_size(axes), pair.ours.model.data_rank(axes)
    ends = [0, *sorted(pair.choose.randint(0, rows) for _ in range(size - 1)), rows]
    local = {name: item[ends[rank] : ends[rank + 1]] for name, item in tensors.items()}
    pair.train_on(batch, pair.ours.model.from_local(local, axes))


def hooks(pair: Pair) -> None:
    """Hooks on parameters: they change gradients, or step an optimizer of their own."""
    if pair.cut:
        return
    trained = [name for name, item in pair.stock.model.named_parameters() if item.requires_grad]
    names = pair.choose.sample(trained, max(1, len(trained) // 3))
    way = pair.choose.choice(("before", "after", "step"))
    batch = pair.batch()

    def after(item: Tensor) -> None:
        assert item.grad is not None
        item.grad.mul_(0.7)

    def step(optimizer: torch.optim.Optimizer, item: Tensor) -> None:
        optimizer.step()
        item.grad = None

    for side in pair.sides:
        handles = []
        for item in side.named(names):
            if way == "before":
                handles.append(item.register_hook(lambda gradient: gradient * 0.5))
            elif way == "after":
                handles.append(item.register_post_accumulate_grad_hook(after))
            else:
                own = torch.optim.SGD([item], lr=1e-2)
                handles.append(item.register_post_accumulate_grad_hook(partial(step, own)))
        side.forward_backward(batch)
        for handle in handles:
            handle.remove()


def fail(pair: Pair) -> None:
    """An exception that is caught on every rank, and gradients that are dropped."""
    batch = pair.batch()
    try:
        pair.ours.forward_backward({name: item for name, item in batch.items() if name not in ("labels", "target")})
        pair.found.append("no error without labels")
    except (autopar.AutoparError, TypeError, KeyError, AttributeError):
        pass
    pair.zero()


def embeddings(pair: Pair) -> None:
    """Embeddings are given, and their gradients asked for."""
    batch = pair.batch()
    if pair.staged or "input_ids" not in batch or pair.recipe.needs_labels or pair.recipe is RECIPES["bart"]:
        return
    rows, length = batch.pop("input_ids").shape
    config: Any = pair.stock.model.config
    generator = torch.Generator().manual_seed(pair.choose.randrange(1 << 20))
    values = torch.randn(rows, length, config.hidden_size, generator=generator, dtype=torch.float64)
    found: list[Tensor | None] = []
    for side in pair.sides:
        given = values.clone().requires_grad_()
        side.scored({"inputs_embeds": given, **batch}).backward()  # type: ignore[no-untyped-call]
        found.append(given.grad)
    pair.compare("input gradient", {"": found[0]}, {"": found[1]})


ACTIONS: Mapping[Callable[[Pair], None], int] = {
    one_step: 5,
    accumulate: 4,
    evaluate: 3,
    two_graphs: 3,
    asked_gradients: 1,
    freeze: 2,
    edit_gradients: 2,
    edit_values: 2,
    state_dicts: 2,
    new_optimizer: 1,
    own_rows: 2,
    hooks: 2,
    fail: 1,
    embeddings: 1,
}

# --- sequences --------------------------------------------------------------------------------------------------------


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """A loss of the logits, outside of the model."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def drawn_options(choose: random.Random, axes: Mapping[str, int], recipe: Recipe) -> dict[str, Any]:
    """Options of `parallelize`."""
    found: dict[str, Any] = {
        "zero": choose.choice((None, 1, 2, 3, 3)),
        "recompute": choose.choice((None, None, "selective", "ops", "full")),
        "micro_batches": choose.choice((1, 1, 2, 4)),
        "outputs": choose.choice((None, None, "full")),
    }
    method = choose.choice((None, "ring", "queries"))
    if "cp" in axes and method is not None:
        found["constraints"] = {"@scaled_dot_product_attention": {"method": {"cp": method}}}
    if choose.random() < 0.2 and len(recipe.lengths) > 1 and not recipe.needs_labels:
        found["loss"] = cross_entropy
    if "pp" in axes:
        found["micro_batches"] = choose.choice((2, 4, 4))
        found["pipeline"] = autopar.Pipeline(
            schedule=choose.choice((None, "1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv"))
        )
    return found


def sequence(seed: int, mesh: str, models: Sequence[str], count: int) -> tuple[str, list[str]]:
    """Runs `count` actions on a model on a mesh: their description, and what differed, up to the first difference.

    What cannot be planned with these options ends at once, with no action and no difference.
    """
    choose = random.Random(seed)
    axes, name = MESHES[mesh], choose.choice(models)
    recipe = RECIPES[name]
    options = drawn_options(choose, axes, recipe)
    rows = choose.choice((4, 8)) if options["micro_batches"] < 4 else 8
    if recipe.make is Normed:
        options["micro_batches"] = 1
    done = [f"seed {seed}, {name} on {dict(axes)}, {rows} rows, {options}:"]
    with LiftFloat32(torch.float64):
        torch.manual_seed(0)
        model = recipe.make().double()
        ranks = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        batch = recipe.batch(rows, recipe.lengths[0], 0)
        loss = options.get("loss")
        try:
            ours = autopar.parallelize(model, ranks, batch, cluster="ideal", memory_limit=1e12, **options)
        except autopar.AutoparError as error:
            return " ".join([*done, f"not planned, {type(error).__name__}: {error}"]), []
        pair = Pair(choose, recipe, options, axes, Side(ours, loss), Side(model, loss), rows)
        pair.optimize()
        for _ in range(count):
            action = choose.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            done.append(action.__name__)
            try:
                action(pair)
                pair.check()
            except Exception as error:
                pair.found.append(f"{type(error).__name__}: {error}")
            if pair.found:
                break
    return " ".join(done), pair.found
