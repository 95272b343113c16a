"""Parts of a stock model that are in another mode than the model."""

from torch import nn

from autopar.models.hooks import listed
from passes.capture import evaluated_parts
from passes.ir.log import logger


def warn_of_evaluated_parts(model: nn.Module) -> None:
    """Warn of parts that stay in evaluation mode while `model` trains, by their outermost paths."""
    outermost: list[str] = []
    for path in evaluated_parts(model):
        if not any(path.startswith(f"{other}.") for other in outermost):
            outermost.append(path)
    if not outermost:
        return
    logger.warning(
        "parts of the model are in evaluation mode (%s) and stay so when the distributed module trains: call "
        "model.train() before parallelize if they should train as the others",
        listed(outermost),
    )
