"""
Test code that meets out-of-memory errors, on any machine.

```python
def test_my_loop_survives_a_small_device():
    with simulate_oom("64MiB") as device:
        train()
    assert device.peak_bytes <= 64 * 2**20
```

With pytest, the marker `@pytest.mark.oom_capacity("64MiB")` does the same for a
whole test, and the fixture `oom_simulation` is the device.

`oomguard.testing.fake_gpu` is PyTorch's CUDA build on a GPU with memory but no
arithmetic: the real allocator and its real errors, at any capacity, without a card.
"""

from oomguard.testing.simulate import Simulation, simulate_oom

__all__ = ["Simulation", "simulate_oom"]
