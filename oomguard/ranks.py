"""What several ranks of a distributed run must agree on."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed
from torch import nn

from oomguard.errors import RankError

# By name, since importing their modules takes long and not every build has them. The last is what `fully_shard` makes.
_TALKATIVE = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def require_one_rank(what: str) -> None:
    """
    Raise if this process is one of several ranks.

    An OOM strikes one rank while the others wait in a collective, so acting on it
    alone would hang the run or let the ranks drift apart.

    Args:
        what: What was asked for, named in the error.

    Raises:
        RankError: A process group of more than one rank is initialised.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise RankError(
                f"oomguard: {what} was used in a process group of {ranks} ranks, which is not supported yet: "
                "ranks would run different numbers of pieces. Find the batch size in a process of its own, "
                "with one rank, and leave some headroom."
            )


def require_own_backward(what: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """
    Raise if the backward of one of *modules* talks to other ranks, even where there are none.

    Its reductions count on every backward coming to its end, so one that ran out of
    memory can't be run again: PyTorch raises an error of its own, or crashes.

    Args:
        what: The step, named in the error.
        modules: Its modules, with their names.

    Raises:
        RankError: One of them is wrapped by `DistributedDataParallel` or sharded by FSDP.
    """
    for name, module in modules:
        wrapper = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _TALKATIVE), None)
        if wrapper is not None:
            raise RankError(
                f"oomguard: {what} runs {name}, a {type(module).__name__} ({wrapper}), whose backward can't be run "
                "again once it ran out of memory. With one rank, use the model without the wrapper; with several, "
                "find the batch size in a process of its own, and leave some headroom."
            )
