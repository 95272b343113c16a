"""Modules that are not of transformers, and one that gives a model a loss."""

import torch
from torch import Tensor, nn


class Scored(nn.Module):
    """A model without a loss, and the mean square of what it makes as its loss."""

    def __init__(self, model: nn.Module, output: str = "") -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The loss, and what the model makes."""
        found = self.model(**inputs)
        found = getattr(found, self.output) if self.output else found
        return {"loss": found.square().mean(), "found": found}


class Classifier(nn.Module):
    """A small convolutional network with all that these are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)
        self.group_norm = nn.GroupNorm(4, 16)
        self.pool = nn.MaxPool2d(2)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """images: [batch, 3, height, width], labels: [batch]."""
        x = self.pool(torch.relu(self.norm(self.stem(images))))
        x = nn.functional.gelu(self.group_norm(self.grouped(x + self.depthwise(x))))
        logits = self.head(self.average(x).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Segmenter(nn.Module):
    """A small U-Net: down, up, and a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.MaxPool2d(2)
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """images: [batch, 3, height, width], labels: [batch, height, width]."""
        fine = self.first(images)
        coarse = self.middle(self.down(fine))
        logits = self.head(self.last(torch.cat([fine, self.up(coarse)], dim=1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Translator(nn.Module):
    """torch's own transformer between two languages."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(64, 32)
        self.target = nn.Embedding(64, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """All [batch, length]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        x = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
