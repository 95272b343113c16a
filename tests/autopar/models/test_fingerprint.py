"""Fingerprints of models."""

import torch
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

import autopar
from autopar.models.fingerprint import structure_fingerprint


def _classifier(**settings: int | str) -> PreTrainedModel:
    small = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**small, **settings))


def test_a_first_forward_pass_changes_no_structure() -> None:
    """A classifier sets its `problem_type` then, and a plan that was made before fits after it."""
    model = _classifier()
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    before = autopar.plan(model, {"dp": 2}, batch, cluster="ideal")
    assert model.config.problem_type is None, "planning changes no model"
    model(**batch)
    assert model.config.problem_type == "single_label_classification"
    assert autopar.plan(model, {"dp": 2}, batch, cluster="ideal", plan=before).fingerprint == before.fingerprint


def test_other_settings_are_another_structure() -> None:
    """So are other classes and dtypes."""
    models = (_classifier(), _classifier(hidden_act="relu"), _classifier(num_labels=3), _classifier().double())
    assert len({structure_fingerprint(model) for model in models}) == len(models)
    assert structure_fingerprint(_classifier()) == structure_fingerprint(models[0])
