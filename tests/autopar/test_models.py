"""Stock models on gloo ranks equal themselves on one device: outputs, loss and every gradient, in float64."""

import pytest

from autopar.testing import assert_equivalent
from tests.autopar.comparing import MESHES, exact, marked
from tests.models import MODELS, gemma2, gpt2, llama, qwen3, tokens


@pytest.mark.long
@pytest.mark.parametrize("objective", marked(["train", "infer"], {"train"}))
@pytest.mark.parametrize("name", marked(MODELS, {"llama"}))
def test_train_and_infer(name, objective):
    """The calls that users make: training and inference on (2, 2), with casts to float32 lifted and as they are."""
    model, inputs = MODELS[name](), tokens(labels=objective == "train")
    comparison = assert_equivalent(model, MESHES["2x2"], inputs, objective=objective, cluster="ideal")
    gradients = [item for item in comparison.errors if item.startswith("gradient of ")]
    assert len(gradients) == (len(list(model.parameters())) if objective == "train" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention(name):
    exact(MODELS[name](attn_implementation="eager"), "2x2", tokens())


@pytest.mark.long
@pytest.mark.parametrize("name", marked(MODELS, {"gpt2"}))
def test_eager_attention_with_padding(name):
    exact(MODELS[name](attn_implementation="eager"), "2x2", tokens(padding=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_padding_mask(name):
    exact(MODELS[name](), "2x2", tokens(padding=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "vocabulary"),
    [
        pytest.param(lambda: llama(tie_word_embeddings=True), 64, id="tied", marks=pytest.mark.slow),
        pytest.param(lambda: gpt2(tie_word_embeddings=False), 64, id="untied gpt2", marks=pytest.mark.slow),
        pytest.param(lambda: qwen3(num_key_value_heads=1), 64, id="one head of keys and values"),
        pytest.param(lambda: llama(vocab_size=61), 61, id="odd vocabulary", marks=pytest.mark.slow),
        pytest.param(lambda: gemma2(vocab_size=67), 67, id="odd vocabulary, tied", marks=pytest.mark.slow),
        pytest.param(lambda: llama(attention_bias=True, mlp_bias=True), 64, id="biases", marks=pytest.mark.slow),
    ],
)
def test_shapes(model, vocabulary):
    exact(model(), "2x2", tokens(vocabulary=vocabulary))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_batch_of_one(mesh):
    exact(llama(), mesh, tokens(batch=1))


@pytest.mark.long
def test_odd_sizes_are_exact():
    """Sizes that nothing divides are not split, and the results are exact."""
    exact(llama(), "2x2", tokens(batch=3, length=7))


def test_evaluation_with_labels():
    """Planned for inference, with labels: there is a loss, and no gradient."""
    exact(gpt2(), "2x2", tokens(), objective="infer")
