"""`assert_equivalent` on models that draw random numbers, and in evaluation."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

import autopar
from autopar.testing import assert_equivalent, compare_on_mesh, run_ranks
from autopar.testing.errors import buffer_errors
from autopar.testing.randomness import WithoutDropout
from tests.models import gpt2, llama, tokens

WIDTH = 16


class Dropping(nn.Module):
    """Dropout in every form: a module, a function that is always on, a number that goes to attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.attention_dropout = 0.5

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, sequence, width]."""
        heads = self.inner(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.attention_dropout)
        x = self.drop(mixed.transpose(1, 2).flatten(-2))
        return {"loss": functional.dropout(x, 0.5, training=True).pow(2).mean()}


class Noisy(nn.Module):
    """Adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, width]."""
        kept = torch.bernoulli(torch.full_like(x, 0.5)) if self.training else 1.0
        return {"loss": (self.inner(x) * kept + torch.rand_like(x)).mean()}


def bert() -> nn.Module:
    """One layer, with dropout."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=64, max_position_embeddings=16))


def vit() -> nn.Module:
    """One layer on images of 8 x 8, whose attention drops too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4, attention_probs_dropout_prob=0.5)
    return ViTForImageClassification(config)


def dropping_gpt2() -> nn.Module:
    """One layer that drops everywhere."""
    return gpt2(n_layer=1, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)


X = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(0))
MESH = {"dp": 2}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_dropout_is_off_on_both_sides(training: bool) -> None:
    model = Dropping().train(training)
    comparison = assert_equivalent(model, MESH, {"x": X})
    assert set(comparison.errors) == {"output ['loss']", "gradient of inner.weight", "gradient of inner.bias"}
    assert model.training is training
    assert model.attention_dropout == 0.5


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make", [dropping_gpt2, bert, vit])
@pytest.mark.slow
def test_stock_models_with_dropout(make, training: bool) -> None:
    assert_equivalent(make().train(training))


@pytest.mark.long
def test_stock_attention_with_dropout() -> None:
    """Its probability is a number in the attention, which `.eval()` of the caller's alone would not reach."""
    assert_equivalent(dropping_gpt2(), MESH)


def test_what_cannot_be_pickled_is_refused() -> None:
    """The ranks are other processes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.register_forward_hook(lambda part, given, made: made)
    with pytest.raises(
        autopar.InputError, match=r"Sequential cannot be pickled for the ranks .*: give one without local"
    ):
        assert_equivalent(model, MESH, {"input": X[:, 0]})


@pytest.mark.long
def test_evaluation_is_compared_in_evaluation() -> None:
    """A batch norm takes other numbers there, and leaves them as they are; gradients are those of its evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()
    inputs = {"input": 3 * X[:, 0] + 1}
    errors = assert_equivalent(model, MESH, inputs).errors
    assert "gradient of 0.weight" in errors
    assert "buffer 1.running_mean" in errors
    assert any(name.startswith("gradient") for name in assert_equivalent(model.train(), MESH, inputs).errors)


def test_other_random_ops_are_named() -> None:
    with pytest.raises(autopar.UnsupportedError) as caught:
        assert_equivalent(Noisy(), MESH, {"x": X[:, 0]})
    found = str(caught.value)
    assert "Noisy cannot be compared with itself" in found
    assert "bernoulli at test_testing.py:" in found
    assert "rand_like at test_testing.py:" in found
    with pytest.raises(autopar.UnsupportedError, match="random numbers: rand_like at"):
        assert_equivalent(Noisy().eval(), MESH, {"x": X[:, 0]})


def test_other_threads_keep_their_dropout() -> None:
    dropped: list[Tensor] = []
    with WithoutDropout():
        thread = threading.Thread(target=lambda: dropped.append(functional.dropout(torch.ones(100), 0.5)))
        thread.start()
        thread.join()
        own = functional.dropout(torch.ones(100), 0.5)
    assert 0 < dropped[0].count_nonzero() < 100
    assert torch.equal(own, torch.ones(100))


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.AlphaDropout(0.5),
        nn.FeatureAlphaDropout(0.5),
        nn.TransformerEncoderLayer(WIDTH, 2, dropout=0.5),
        nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_with_dropout(module: nn.Module) -> None:
    before = torch.get_rng_state()
    with WithoutDropout():
        module(X)
    assert torch.equal(torch.get_rng_state(), before)
    module(X)
    assert not torch.equal(torch.get_rng_state(), before)


def test_models_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(autopar.InputError, match="'weight' is on meta, without values to compare"):
        assert_equivalent(model, {"dp": 2}, (torch.zeros(2, 2),))


class Centred(nn.Module):
    """A second norm whose input has a mean of zero, but for rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [rows, 8]."""
        return {"loss": self.layers(x).square().sum(1).tanh().sum()}


@pytest.mark.long
def test_means_of_rounding_errors_are_equal() -> None:
    """Rows in another order change them on one device, too; those of other samples are an error."""
    inputs = {"x": torch.randn(12, 8, generator=torch.Generator().manual_seed(0))}
    found = assert_equivalent(Centred(), {"dp": 2}, inputs)
    assert "buffer layers.3.running_mean" in found.errors
    models = [Centred().double() for _ in range(2)]
    before = {name: buffer.clone() for name, buffer in models[0].named_buffers()}
    for model, given in zip(models, (inputs["x"], inputs["x"][:6]), strict=True):
        model(given.double())
    errors = dict(buffer_errors(models[1], models[0], before, in_stages=False))
    assert min(errors["buffer layers.1.running_mean"], errors["buffer layers.3.running_var"]) > 1e-3


class Chosen(nn.Module):
    """Scores of choices that are almost equal: their gradients cancel in those of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [rows, choices, 8], labels: [rows]."""
        scores = self.score(1 + 1e-6 * x).squeeze(-1)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def test_gradients_that_cancel_are_equal() -> None:
    """That of the bias is zero, but for rounding errors of its addends, which are those of the scores."""
    random = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(12, 3, 8, generator=random), "labels": torch.randint(3, (12,), generator=random)}
    model = Chosen()
    found = assert_equivalent(model, {"dp": 2}, inputs)
    assert "gradient of score.bias" in found.errors
    model.double()(inputs["x"].double(), inputs["labels"])["loss"].backward()
    weight, bias = model.score.weight.grad, model.score.bias.grad
    assert weight is not None
    assert bias is not None
    assert 0 < bias.abs().max() < 1e-15
    assert weight.abs().max() < 1e-5


class Masked(nn.Module):
    """Scores of which some are hidden, by a mask that is a buffer."""

    def __init__(self, hidden: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(8, 4)
        mask = torch.zeros(4)
        mask[hidden:] = float("-inf")
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [rows, 8]."""
        scores = self.score(x) + self.mask
        return {"loss": scores.softmax(-1).square().sum(), "scores": scores, "spectrum": torch.fft.fft(self.score(x))}


@pytest.mark.long
def test_infinite_and_complex_elements() -> None:
    """Infinite ones must be the same, which are no error then; complex ones are compared like others."""
    found = assert_equivalent(Masked(), {"dp": 2, "tp": 2}, {"x": torch.randn(4, 8)})
    assert max(found.errors.values()) < 1e-9
    assert "output ['spectrum']" in found.errors
    models = [Masked(hidden) for hidden in (2, 3)]
    before = {"mask": torch.zeros(4)}
    assert dict(buffer_errors(models[0], models[0], before, in_stages=False)) == {"buffer mask": 0.0}
    assert dict(buffer_errors(models[1], models[0], before, in_stages=False)) == {"buffer mask": float("inf")}


class Tabled(nn.Module):
    """Makes a table when it first runs, and keeps it in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(8, 4)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, 8]."""
        if self.table is None:
            self.register_buffer("table", torch.arange(4, device=x.device).to(x.dtype).cos(), persistent=False)
        return {"loss": (self.score(x) * self.table).square().sum()}


@pytest.mark.long
def test_buffers_that_are_made_by_a_call() -> None:
    """The model has none before, and the trace leaves none."""
    found = assert_equivalent(Tabled(), {"dp": 2, "tp": 2}, {"x": torch.randn(4, 8)})
    assert set(found.errors) == {"output ['loss']", "gradient of score.weight", "gradient of score.bias"}


class Spectral(nn.Module):
    """A layer whose weights multiply frequencies, and that has more than tensors in its state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))
        self.head = nn.Linear(8, 2)

    def get_extra_state(self) -> dict[str, int]:
        """As a library may keep its settings."""
        return {"modes": 5}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Nothing is kept."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [rows, 8]."""
        mixed = torch.fft.irfft(torch.fft.rfft(x)[:, None] * self.weight, n=8)
        return {"loss": self.head(mixed).tanh().square().sum()}


@pytest.mark.long
def test_complex_parameters() -> None:
    """They are compared in the complex dtype of the others."""
    found = assert_equivalent(Spectral(), {"dp": 2, "tp": 2}, {"x": torch.randn(4, 8)})
    assert found.errors["gradient of weight"] < 1e-12


class Filling(nn.Module):
    """Puts what a layer gives into zeros that nobody gave a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, width]."""
        filled = torch.zeros(x.shape[0], 2 * WIDTH)
        filled[:, torch.arange(0, 2 * WIDTH, 2)] = self.inner(x).float()
        return filled.square().mean()


@pytest.mark.long
def test_tensors_of_the_default_dtype() -> None:
    """They are of the dtype in which the model is compared."""
    assert_equivalent(Filling(), {"dp": 2, "tp": 2}, {"x": torch.randn(4, WIDTH)})


def _checkpointed(reentrant: bool) -> float:
    model = llama().double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return compare_on_mesh(model, mesh, tokens(), torch.float64, cluster="ideal").worst[1]


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_models_that_compute_again(reentrant: bool) -> None:
    """A plan has its own choice of what is computed again; what is lifted in the forward pass is compared."""
    assert max(run_ranks(_checkpointed, 2, reentrant)) < 1e-9


class Undefined(nn.Module):
    """A root whose gradient is NaN at zero; `inside` float32, which the checker lifts, only where numbers are large."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [rows, 8]."""
        scores = self.linear(x)
        if self.inside:
            large = (scores * 1e200).float()
            return {"loss": scores.sum(), "large": large - large}
        return {"loss": (scores - scores).sqrt().sum() + scores.sum(), "large": scores}


def test_what_is_no_number_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to compare it with; with float32 inside, where numbers may be too large, it is left out."""
    x = {"x": torch.randn(4, 8)}
    with pytest.raises(AssertionError, match="on one device gives NaN for gradient of linear"):
        assert_equivalent(Undefined(False), {"dp": 2}, x)
    found = assert_equivalent(Undefined(True), {"dp": 2}, x)
    assert found.errors["output ['large']"] == 0.0
    assert "left out, because it is NaN on one device: output ['large']" in capsys.readouterr().out
