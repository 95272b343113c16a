"""Methods of a model that its distributed module does not have, and their replacements."""

from collections.abc import Mapping

from passes.ir.errors import UnsupportedAttributeError

_EXPORT = (
    "collect the weights with torch.distributed.checkpoint.state_dict.get_model_state_dict(dist_model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and on rank 0 call the model's own "
)
_CHECKPOINTING = (
    "recompute is decided when the model is planned: pass recompute= ('none', 'selective', "
    "'full', or a level by region) to autopar.parallelize"
)
_INSTEAD: Mapping[str, str] = {
    "generate": "a plan has no steps of decoding: save the weights, and generate with the model itself, or with an "
    "engine for inference",
    "save_pretrained": f"{_EXPORT}save_pretrained(folder, state_dict=...)",
    "push_to_hub": f"{_EXPORT}save_pretrained(folder, state_dict=...), then upload the folder",
    "gradient_checkpointing_enable": _CHECKPOINTING,
    "gradient_checkpointing_disable": _CHECKPOINTING,
    "resize_token_embeddings": "shapes of parameters are part of the plan: resize the model before "
    "autopar.parallelize, and plan it anew",
}


def missing_method(model_class: type, name: str) -> UnsupportedAttributeError | None:
    """The error for an attribute that a distributed module has not, but the class of its model has; None if neither
    has it."""
    if name.startswith("_") or not hasattr(model_class, name):
        return None
    instead = _INSTEAD.get(name, "it has the model's forward, parameters and buffers alone; ask the model itself")
    return UnsupportedAttributeError(
        f"{model_class.__name__}.{name} is not available on the distributed module: {instead}"
    )
