"""The first example of the README."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomguard import Input, fit_batch, oom_guard

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
data = TensorDataset(torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,)))


# A CPU is told how much memory to use; a GPU knows.
@fit_batch(inputs={"images": Input(3, 32, 32), "labels": Input(dtype=torch.long, high=10)}, capacity="64MiB")
def train_step(images, labels):
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


print(train_step.batch_size)  # probed here, once
print(train_step.report)  # the table of trials

loader = DataLoader(data, batch_size=500)  # what the training wants, whatever the card can hold
with oom_guard() as guard:
    for images, labels in loader:
        loss = train_step(images.to(device), labels.to(device))
print(guard.report)
