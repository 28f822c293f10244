"""
Train a small CNN on scikit-learn's 1,797 images of digits: `python examples/digits.py --capacity 64MiB`.

The whole update stands inside the decorated step. On a machine without a GPU,
--capacity simulates a device of that size, so that the guard has work to do.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomguard import Input, fit_batch, oom_guard
from oomguard.testing import simulate_oom

parser = argparse.ArgumentParser(description="Train a small CNN on 8x8 images of digits.")
parser.add_argument("--capacity", help="bytes of the simulated device, such as 64MiB; CPU only")
parser.add_argument(
    "--batch-size", type=int, default=1024, help="what the training wants, whatever the device can hold"
)
parser.add_argument("--epochs", type=int, default=40)
options = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() and not options.capacity else "cpu")

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, test = order[:1437], order[1437:]


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution with batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


model = nn.Sequential(
    block(1, 32),
    block(32, 64),
    nn.MaxPool2d(2),
    block(64, 64),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(256, 10),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 1e-2, total_steps=options.epochs * -(-1437 // options.batch_size)
)
criterion = nn.CrossEntropyLoss()


@fit_batch(inputs={"images": Input(1, 8, 8), "labels": Input(dtype=torch.long, high=10)}, dataset_size=1437)
def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Run one whole update."""
    model.train()
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.detach()


def predict(images: torch.Tensor) -> torch.Tensor:
    """Return the most likely digits."""
    model.eval()
    with torch.no_grad():
        return model(images).argmax(1)


def main() -> None:
    """Probe, train, evaluate."""
    started = time.perf_counter()
    print(f"largest batch that fits: {train_step.batch_size}\n")
    print(train_step.report, end="\n\n")

    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=options.batch_size, shuffle=True)
    with oom_guard(min_batch_size=2) as guard:
        for epoch in range(options.epochs):
            for x, y in loader:
                loss = train_step(x.to(device), y.to(device))
            if epoch % 10 == 9:
                print(f"epoch {epoch + 1}: loss {loss:.4f}")
        guessed = guard.run(predict, images.to(device))  # all images at once: the guard cuts them if it has to

    right = guessed.cpu() == labels
    print(f"test accuracy {right[test].float().mean():.4f}, {time.perf_counter() - started:.0f} s\n")
    print(guard.report)


if __name__ == "__main__":
    with simulate_oom(options.capacity) if options.capacity else contextlib.nullcontext():
        main()
