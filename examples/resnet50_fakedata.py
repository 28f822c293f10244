"""
Find the batch size of ResNet-50 on 1,000 fake images, then train: `python examples/resnet50_fakedata.py`.

This is the demonstration of the article that oomguard grew out of. On a CPU it
takes a simulated device of --capacity and a few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import resnet50
from torchvision.transforms import ToTensor

from oomguard import Input, find_batch_size, fit_batch, oom_guard
from oomguard.testing import simulate_oom

parser = argparse.ArgumentParser(description="Find the batch size of ResNet-50, then train.")
parser.add_argument("--capacity", default="1536MiB", help="bytes of the simulated device on a CPU")
parser.add_argument("--steps", type=int, help="how many batches to train on (default: all on a GPU, 2 on a CPU)")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
steps = options.steps or (None if on_gpu else 2)

data = FakeData(size=1000, image_size=(3, 224, 224), num_classes=1000, transform=ToTensor())
model = resnet50().to(device)
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()


@fit_batch(
    inputs={"images": Input(3, 224, 224), "labels": Input(dtype=torch.long, high=1000)},
    dataset_size=len(data),
    steps_per_trial=3 if on_gpu else 2,
)
def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Run one whole update."""
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    """Find the size, by the article's function and by the decorator, then train."""
    doubled = find_batch_size(model, device, (3, 224, 224), (1000,), len(data), num_iterations=5 if on_gpu else 2)
    print(f"find_batch_size (doubling): {doubled}")
    print(f"fit_batch: {train_step.batch_size}\n\n{train_step.report}\n")

    loader = DataLoader(data, batch_size=train_step.batch_size, shuffle=True)
    with oom_guard() as guard:
        for images, labels in itertools.islice(loader, steps):
            loss = train_step(images.to(device), labels.to(device))
            print(f"loss {loss:.3f}")
    print(guard.report)


if __name__ == "__main__":
    with contextlib.nullcontext() if on_gpu else simulate_oom(options.capacity):
        main()
