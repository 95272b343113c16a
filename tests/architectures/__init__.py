"""Tiny models of stock architectures, with a loss, and batches for them.

One line per architecture: the stock class, the kind of batch it takes, and what its config needs beyond the sizes that
all share. Nothing is random: no dropout, no dropped layers, no masks drawn in training.
"""

import dataclasses
from collections.abc import Mapping

from tests.architectures.architecture import Architecture
from tests.architectures.extra import extra
from tests.architectures.packages import others, packages
from tests.architectures.recent import recent
from tests.architectures.required import required
from tests.architectures.vision_text import vision_text

ARCHITECTURES: Mapping[str, Architecture] = {
    **{item.name: item for item in (*required(), *others())},
    **{item.name: dataclasses.replace(item, extra=True) for item in (*extra(), *recent(), *vision_text(), *packages())},
}
