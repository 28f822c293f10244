"""The steps and the finders that `compare_finders.py` compares; it runs on the fake GPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from oomguard import Input, fit_batch
from oomguard.memory.oom import is_oom

STEPS = 3  # at each size, for every finder that lets its caller choose


class Counted:
    """A train step, with how often it ran: `run(size)` makes a batch and runs it."""

    def __init__(self, model: nn.Module, make: Callable[[int], Any], loss: Callable[[Any], torch.Tensor]) -> None:
        self.model = model.cuda()
        self.make, self._loss = make, loss
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained)
        self.autocast: Any = contextlib.nullcontext()
        self.scaler: torch.amp.GradScaler | None = None
        self.reset()

    def step(self, batch: Any) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        with self.autocast:
            loss = self._loss(batch)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def run(self, size: int) -> None:
        """Make a batch of *size* items and train on it; count it."""
        self.steps += 1
        self.samples += size
        try:
            self.step(self.make(size))
        except RuntimeError as error:
            self.ooms += is_oom(error)
            raise

    def reset(self) -> None:
        """Forget all training and all counts, and come back to the card if a finder has left it."""
        if next(self.model.parameters()).device.type != "cuda":
            self.model.cuda()
        self.optimizer.state.clear()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.steps = self.samples = self.ooms = 0
        gc.collect()
        torch.cuda.empty_cache()

    def fits(self, size: int) -> bool:
        """Tell whether *STEPS* steps run from a clean start."""
        self.reset()
        try:
            for _ in range(STEPS):
                self.run(size)
        except torch.OutOfMemoryError:
            return False
        return True

    def true_maximum(self) -> int:
        """Return the largest size that runs, by bisection, and eight sizes above it."""
        low = 1
        while self.fits(2 * low):
            low *= 2
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        largest = max([low, *(size for size in range(high + 1, high + 9) if self.fits(size))])
        self.reset()
        return largest


# The steps.


def _images(pixels: int = 224, classes: int = 1000) -> Callable[[int], Any]:
    return lambda size: (
        torch.randn(size, 3, pixels, pixels, device="cuda"),
        torch.randint(classes, (size,), device="cuda"),
    )


def _classifier(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Counted:
    forward = run or model
    return Counted(model, _images(), lambda batch: functional.cross_entropy(forward(batch[0]), batch[1]))


def resnet50() -> Counted:
    """ResNet-50 in single precision."""
    return _classifier(torchvision.models.resnet50())


def resnet50_amp() -> Counted:
    """ResNet-50 in half precision, with a gradient scaler."""
    case = resnet50()
    case.autocast, case.scaler = torch.autocast("cuda", torch.float16), torch.amp.GradScaler("cuda")
    return case


def resnet50_checkpointed() -> Counted:
    """ResNet-50 that recomputes its activations."""
    m = torchvision.models.resnet50()
    stem = [m.conv1, m.bn1, m.relu, m.maxpool]
    layers = nn.Sequential(*stem, *m.layer1, *m.layer2, *m.layer3, *m.layer4, m.avgpool, nn.Flatten(), m.fc)
    return _classifier(m, lambda x: checkpoint_sequential(layers, 5, x, use_reentrant=False))


def vit() -> Counted:
    """ViT-B/16 in single precision."""
    return _classifier(torchvision.models.vit_b_16())


def vit_amp() -> Counted:
    """ViT-B/16 in bfloat16."""
    case = vit()
    case.autocast = torch.autocast("cuda", torch.bfloat16)
    return case


def swin() -> Counted:
    """Swin-T in single precision."""
    return _classifier(torchvision.models.swin_t())


class _Gpt(nn.Module):
    def __init__(self, words: int = 50257, width: int = 768, length: int = 512, depth: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(
            type(layer)(width, 12, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.recomputes else layer(h)
        return self.head(h)


def gpt_amp() -> Counted:
    """A GPT-2 small of 512 tokens with tied embeddings, in bfloat16."""
    model = _Gpt()
    case = Counted(
        model,
        lambda size: torch.randint(50257, (size, 512), device="cuda"),
        lambda batch: functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()),
    )
    case.autocast = torch.autocast("cuda", torch.bfloat16)
    return case


def contrastive() -> Counted:
    """Two views through ResNet-18: every item is compared with every other."""
    model = torchvision.models.resnet18(num_classes=128)

    def loss(x: torch.Tensor) -> torch.Tensor:
        one, two = (functional.normalize(model(view), dim=1) for view in (x, x.flip(3)))
        return functional.cross_entropy(one @ two.t(), torch.arange(len(x), device="cuda"))

    return Counted(model, lambda size: torch.randn(size, 3, 64, 64, device="cuda"), loss)


def embedding() -> Counted:
    """A frozen table of 5 GB under a small network."""
    table = nn.EmbeddingBag(10_000_000, 128, mode="mean").requires_grad_(requires_grad=False)
    model = nn.Sequential(table, nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1))
    return Counted(
        model,
        lambda size: torch.randint(10_000_000, (size, 50), device="cuda"),
        lambda batch: model(batch).square().mean(),
    )


def lstm() -> Counted:
    """Two layers of LSTM over 64 words."""
    words, rnn, head = nn.Embedding(30_000, 512), nn.LSTM(512, 1024, 2, batch_first=True), nn.Linear(1024, 30_000)
    return Counted(
        nn.ModuleList([words, rnn, head]),
        lambda size: (torch.randint(30_000, (size, 64), device="cuda"), torch.randint(30_000, (size,), device="cuda")),
        lambda batch: functional.cross_entropy(head(rnn(words(batch[0]))[0][:, -1]), batch[1]),
    )


CASES = {
    "ResNet-50": resnet50,
    "ResNet-50 amp": resnet50_amp,
    "ResNet-50 checkpointed": resnet50_checkpointed,
    "ViT-B/16": vit,
    "ViT-B/16 amp": vit_amp,
    "Swin-T": swin,
    "GPT-2 small amp": gpt_amp,
    "contrastive": contrastive,
    "5 GB embedding": embedding,
    "LSTM": lstm,
}


# The finders: each returns its answer for a step. *above* is a power of two above the truth, where a finder
# starts from the top; none would be told so much.


def _oomguard(search: str) -> Callable[[Counted, int], int]:
    def find(case: Counted, above: int) -> int:
        def batch(size: int, device: torch.device) -> Any:
            return torch.empty(size)

        @fit_batch(inputs={"x": Input(make=batch)}, state=case, device="cuda", headroom=0, search=search)
        def step(x: torch.Tensor) -> None:
            case.run(len(x))

        report = step.probe()
        # The probe puts the counters back as well, so they are read from its report.
        case.steps = sum(trial.steps + (not trial.passed) for trial in report.trials)
        case.samples = sum((trial.steps + (not trial.passed)) * trial.batch_size for trial in report.trials)
        case.ooms = sum(not trial.passed for trial in report.trials)
        return report.batch_size or 0

    return find


def _article(case: Counted, above: int) -> int:
    size, answer = 2, 0
    while True:
        try:
            for _ in range(5):
                case.run(size)
        except torch.OutOfMemoryError:
            break
        answer, size = size, 2 * size
    return answer


def _lightning(mode: str) -> Callable[[Counted, int], int]:
    def find(case: Counted, above: int) -> int:
        import lightning  # noqa: PLC0415 - an extra, and slow

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.model, self.batch_size = case.model, 2
                self.counter = nn.Parameter(torch.zeros(1))  # Lightning counts the steps of an optimizer

            def training_step(self, batch: Any) -> None:
                case.run(self.batch_size)
                self.optimizers().step()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD([self.counter])

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(range(10**6), batch_size=None)

        for name in ("lightning", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = lightning.Trainer(accelerator="gpu", devices=1, max_steps=10**6, default_root_dir=folder, **quiet)
            tuner = lightning.pytorch.tuner.Tuner(trainer)
            return int(tuner.scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS, max_trials=40) or 0)

    return find


def _accelerate(case: Counted, above: int) -> int:
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - an extra

    @find_executable_batch_size(starting_batch_size=above)
    def train(batch_size: int) -> int:
        for _ in range(STEPS):
            case.run(batch_size)
        return batch_size

    return int(train())


def _toma(case: Counted, above: int) -> int:
    import toma  # noqa: PLC0415 - an extra

    def train(size: int) -> int:
        for _ in range(STEPS):
            case.run(size)
        return size

    return int(toma.simple.batch(train, above))


def _torch_max_mem(case: Counted, above: int) -> int:
    from torch_max_mem import maximize_memory_utilization  # noqa: PLC0415 - an extra

    @maximize_memory_utilization()
    def train(batch_size: int) -> int:
        for _ in range(STEPS):
            case.run(batch_size)
        return batch_size

    return int(train(batch_size=above))


def _batch_probe(case: Counted, above: int) -> int:
    import batch_probe  # noqa: PLC0415 - an extra

    def work(size: int) -> None:
        for _ in range(STEPS):
            case.run(size)

    return int(batch_probe.probe(work, high=above, headroom=0, backend="torch", verbose=False))


def _batch_finder(case: Counted, above: int) -> int | None:
    """Make its own inputs and losses, so only models of one image batch can be given to it."""
    from batch_finder import find_max_minibatch  # noqa: PLC0415 - an extra

    if type(case.model).__module__.split(".")[0] != "torchvision" or case.scaler or case.make(1)[0].dim() != 4:
        return None

    def count(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        case.steps += 1
        case.samples += len([*args, *kwargs.values()][0])

    hook = case.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with case.autocast:
            found = find_max_minibatch(
                lambda: case.model,
                input_shapes=(-1, 3, 224, 224),
                delay=0,
                use_subprocess=False,
                device=torch.device("cuda"),
            )
    finally:
        hook.remove()
    return int(found[0]) if found else 0


FINDERS: dict[str, Callable[[Counted, int], int | None]] = {
    "oomguard replay": _oomguard("replay"),
    "oomguard bisect": _oomguard("bisect"),
    "oomguard double": _oomguard("double"),
    "the article": _article,
    "Lightning power": _lightning("power"),
    "Lightning binsearch": _lightning("binsearch"),
    "accelerate": _accelerate,
    "toma": _toma,
    "torch-max-mem": _torch_max_mem,
    "batch-probe": _batch_probe,
    "batch-finder": _batch_finder,
}
