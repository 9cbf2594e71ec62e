"""Train a small CNN with batch norm on scikit-learn's digits.

    python examples/digits.py --epochs 6 --policy memory
    autoprec calibrate examples/digits.py:target

The training loop is a plain one; `model = autoprec.compile(model)` is the only line about precision.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import autoprec


def make_model(width: int = 8) -> nn.Sequential:
    def layer(channels_in: int, channels_out: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *layer(1, width, 1),
        *layer(width, 2 * width, 2),
        *layer(2 * width, 2 * width, 1),
        *layer(2 * width, 4 * width, 2),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def make_loaders(size: int = 64) -> tuple[DataLoader, DataLoader]:
    """Training and test batches."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, size, shuffle=True, drop_last=True), DataLoader(test, size)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def target() -> tuple[nn.Module, DataLoader, object]:
    """For `autoprec calibrate`."""
    return make_model(), make_loaders()[0], loss_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--policy", default="balanced", help="memory, balanced, speed, safe, … or a file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, test = make_loaders()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    model = autoprec.compile(model, policy=args.policy)  # the one added line

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test)
        print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {right / len(test.dataset):.4f}")

    session = autoprec.session(model)
    if session.plan is not None:
        print(f"formats: {', '.join(session.plan.formats_used())}")


if __name__ == "__main__":
    main()
