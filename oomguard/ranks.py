"""What several ranks of a distributed run must agree on."""

from __future__ import annotations

import torch.distributed

from oomguard.errors import RankError


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
