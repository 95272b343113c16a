"""Functions of `transformers` are replaced in a trace where their replacement computes what they do."""

import importlib
import logging

import pytest
import torch
from torch import Tensor, nn

from autopar.models.loops import without_loops
from tests.autopar.models.test_delta_rule import MODELING, MODELS
from tests.autopar.models.test_mamba import MODELS as STATE_SPACES

MAMBA = "transformers.models.mamba.modeling_mamba"


def test_another_rule_is_traced_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A version whose function has other arguments keeps its own."""

    def other(query: Tensor, speed: float) -> Tensor:
        return query * speed

    module = importlib.import_module(MODELING)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", other)
    with caplog.at_level(logging.INFO, logger="autopar"), without_loops(MODELS["decays of heads"]()):
        assert module.torch_chunk_gated_delta_rule is other
    assert "another torch_chunk_gated_delta_rule" in caplog.text


def _own_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Tensor | None = None,
    use_mambapy: bool = False,
    **kwargs: object,
) -> str:
    return "its own"


@pytest.mark.parametrize(
    ("more", "is_own"),
    [
        ({}, False),
        ({"initial_state": None, "seq_idx": None, "use_mambapy": True, "other": 1}, False),
        ({"initial_state": torch.zeros(1, 2, 3)}, True),
        ({"seq_idx": torch.zeros(1, 5)}, True),
    ],
)
def test_arguments_that_are_not_taken(monkeypatch: pytest.MonkeyPatch, more: dict[str, object], is_own: bool) -> None:
    """A call that gives an argument which may change the result is one of the function itself."""
    module = importlib.import_module(MAMBA)
    monkeypatch.setattr(module, "mamba_selective_scan", _own_scan)
    model: nn.Module = STATE_SPACES["mamba"]()
    x, wide = torch.ones(1, 2, 5), torch.ones(1, 3, 5)
    with without_loops(model):
        result = module.mamba_selective_scan(x, x, -torch.ones(2, 3), wide, wide, **more)
    assert isinstance(result, str) == is_own
