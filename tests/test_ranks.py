"""Several ranks are refused, by name and before anything runs."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from oomguard import Input, fit_batch, oom_guard
from oomguard.errors import RankError


@fit_batch(inputs={"x": Input(3)}, max_batch_size=4)
def step(x):
    return x.mean()


def use_in_a_group(rank, ranks, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    try:
        for use in (step.probe, oom_guard().__enter__):
            if ranks == 1:
                use()
                continue
            try:
                use()
            except RankError as error:
                assert "a process group of 2 ranks, which is not supported yet" in str(error)  # noqa: PT017 - a child
            else:
                raise AssertionError("nothing was raised")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of PyTorch has no torch.distributed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_more_than_one_rank_is_refused(ranks, tmp_path):
    torch.multiprocessing.start_processes(
        use_in_a_group, (ranks, tmp_path / "store"), nprocs=ranks, start_method="fork"
    )
