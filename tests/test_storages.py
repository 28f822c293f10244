"""The meter counts what operations allocate on the CPU, and refuses what goes over a capacity."""

import re
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from oomguard.memory.oom import is_fragmented, is_oom
from oomguard.memory.storages import StorageMeter, active_meter, beside_the_device, out_of_memory

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
ROW = 4 * KIB  # bytes of a row() below


def row(**options):
    return torch.ones(KIB, **options)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.full_like(x, 2.0)


def out_variant():
    out = row()
    torch.add(out, 1, out=out)
    return out


def grown_out_variant():
    out = torch.empty(0)
    torch.add(row(), 1, out=out)
    return out


def resized(length):
    x = row()
    x.resize_(length)
    return x


def emptied_storage():
    x = row()
    x.untyped_storage().resize_(0)
    return x.detach()  # seen at the next operation


def foreach_in_place():
    rows = [row(), row()]
    torch._foreach_add_(rows, 1.0)
    torch._foreach_mul_(rows, rows)
    return rows


# What is kept, the bytes that then live, the peak, and the allocations.
PROGRAMS = {
    "one tensor": (row, ROW, ROW, 1),
    "a result": (lambda: row() + 1, ROW, 2 * ROW, 2),
    "a wider type": (lambda: row().double(), 2 * ROW, 3 * ROW, 2),
    "views": (lambda: row()[4:].view(-1, 3).t().unsqueeze(0).expand(4, -1, -1), ROW, ROW, 1),
    "a view keeps the whole": (lambda: row()[:1], ROW, ROW, 1),
    "detach and data": (lambda: [(x := row()).detach(), x.data], ROW, ROW, 1),
    "in place": (lambda: row().add_(1).mul_(2).clamp_(0), ROW, ROW, 1),
    "contiguous already": (lambda: row().contiguous().to("cpu").float(), ROW, ROW, 1),
    "chunks of one": (lambda: row().split(100), ROW, ROW, 1),
    "an out= argument": (out_variant, ROW, ROW, 1),
    "a growing out= argument": (grown_out_variant, ROW, 2 * ROW, 2),
    "foreach in place": (foreach_in_place, 2 * ROW, 2 * ROW, 2),
    "foreach": (lambda: torch._foreach_add([row(), row()], 1.0), 2 * ROW, 4 * ROW, 4),
    "several results": (lambda: row().max(0), 12, ROW + 12, 3),
    "batch norm": (
        lambda: torch.native_batch_norm(torch.ones(8, 4), None, None, None, None, training=True, momentum=0.1, eps=1),
        128 + 32,
        2 * 128 + 32,
        4,
    ),
    "growing": (lambda: resized(2 * KIB), 2 * ROW, 3 * ROW, 2),
    "shrinking keeps the storage": (lambda: resized(3), ROW, ROW, 1),
    "an emptied storage": (emptied_storage, 0, ROW, 1),
    "nothing": (lambda: torch.empty(0), 0, 0, 0),
    "on another device": (lambda: torch.ones(KIB, device="meta") + 1, 0, 0, 0),
    "lent by numpy": (lambda: torch.from_numpy(pytest.importorskip("numpy").ones(8)), 0, 0, 0),
    "numbers from Python": (lambda: torch.tensor([1.0, 2.0]), 0, 0, 0),
    "sparse": (lambda: torch.eye(2).to_sparse(), 0, 16, None),
    "a subclass made of tensors": (
        lambda: torch.nested.nested_tensor_from_jagged(torch.ones(4, 2), torch.arange(0, 6, 2)) * 2,
        32 + 24,
        2 * 32 + 24,
        3,
    ),
    "higher order": (lambda: torch.cond(torch.ones(()) > 0, torch.exp, torch.sin, (row(),)), ROW, None, None),
    "saved for the backward": (lambda: (row(requires_grad=True) * 2).exp().sum(), 2 * ROW + 4, None, None),
}


@pytest.mark.parametrize("refuse_first", [False, True])
@pytest.mark.parametrize(("program", "live", "peak", "allocations"), PROGRAMS.values(), ids=PROGRAMS)
def test_bytes_are_counted_exactly_and_given_back(program, live, peak, allocations, refuse_first):
    with StorageMeter(TIB if peak is None else peak, refuse_first=refuse_first) as meter:  # it just fits
        kept = program()

        assert meter.live_bytes == live
        assert peak is None or meter.peak_bytes == peak
        assert allocations is None or meter.allocations == allocations
        del kept
    assert meter.live_bytes == 0


def model_and_batch(width=64, batch=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)), torch.randn(batch, width)


def train(model, batch, optimizer, after=lambda phase: None):
    loss = model(batch).square().mean()
    after("forward")
    loss.backward()
    after("backward")
    optimizer.step()
    after("optimizer")


def test_a_step_leaves_gradients_and_optimizer_state():
    model, batch = model_and_batch()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    with StorageMeter() as meter:
        optimizer = torch.optim.Adam(model.parameters())
        train(model, batch, optimizer)
    assert meter.live_bytes == 3 * parameters  # gradients and two moments
    model.zero_grad()
    assert meter.live_bytes == 2 * parameters
    optimizer.state.clear()
    assert meter.live_bytes == 0


def test_what_is_saved_for_the_backward_lives_until_it_has_run():
    x = row(requires_grad=True)
    with StorageMeter() as meter:
        loss = (x * 2).exp().exp().sum()
        assert meter.live_bytes == 2 * ROW + 4  # the results of both exp
        loss.backward()
        assert meter.live_bytes == ROW + 4  # the gradient


@pytest.mark.parametrize(
    ("layer", "saved"),
    [
        (lambda x: x.exp().exp().exp(), 3 * ROW),
        (lambda x: checkpoint(lambda y: y.exp().exp().exp(), x, use_reentrant=False), ROW),
        (lambda x: checkpoint(lambda y: y.exp().exp().exp(), x, use_reentrant=True), ROW),
        (lambda x: Double.apply(x * 1), 2 * ROW),
    ],
    ids=["plain", "checkpoint", "reentrant checkpoint", "own function"],
)
def test_what_a_backward_keeps_and_makes_is_counted(layer, saved):
    x = row(requires_grad=True)
    with StorageMeter() as meter:
        y = layer(x)
        assert meter.live_bytes == saved
        meter.reset_peak()
        y.sum().backward()
        assert meter.peak_bytes > saved + ROW
        del y
        assert meter.live_bytes == ROW  # the gradient


def test_nested_meters_both_count_and_the_inner_one_is_the_active_one():
    assert active_meter() is None
    with StorageMeter() as outer:
        a = row()
        with StorageMeter() as inner:
            b = row()
            assert active_meter() is inner
        assert active_meter() is outer
        assert (outer.live_bytes, inner.live_bytes) == (2 * ROW, ROW)
        del a, b
    assert active_meter() is None
    assert (outer.live_bytes, inner.live_bytes) == (0, 0)
    assert (outer.peak_bytes, inner.peak_bytes) == (2 * ROW, ROW)


def test_the_peak_starts_anew_from_what_lives():
    with StorageMeter() as meter:
        kept = row()
        _ = row() + row()
        meter.reset_peak()
        assert meter.peak_bytes == meter.live_bytes == 2 * ROW
        del kept
    assert meter.peak_bytes == 2 * ROW


@pytest.mark.parametrize("refuse_first", [False, True])
def test_what_is_kept_beside_the_device_is_not_counted(refuse_first):
    with StorageMeter(ROW, refuse_first=refuse_first) as meter:
        x = row()
        with beside_the_device():
            copies = [x.clone(), x.clone()]
        assert (meter.live_bytes, meter.allocations) == (ROW, 1)
        assert torch.equal(*copies)
        with pytest.raises(torch.OutOfMemoryError):
            copies[0] + 1


def test_what_another_thread_allocates_is_not_counted_and_what_it_frees_is():
    with StorageMeter() as meter:
        kept, freed = [], [row()]
        thread = threading.Thread(target=lambda: (kept.append(row()), freed.clear()))
        thread.start()
        thread.join()
    assert (meter.allocations, meter.live_bytes) == (1, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("refuse_first", [False, True])
def test_compiled_functions_are_counted_as_they_were_written(backend, refuse_first):
    model, batch = model_and_batch(8)

    def counted(function):
        model.zero_grad()
        with StorageMeter(TIB, refuse_first=refuse_first) as meter:
            function(batch).sum().backward()
        return meter.live_bytes, meter.peak_bytes, meter.allocations

    assert counted(torch.compile(model, backend=backend)) == counted(model)


# Refusal.

WORDING = re.compile(
    r"CUDA out of memory\. Tried to allocate [\d.]+ \w+\. GPU 0 has a total capacity of [\d.]+ \w+ of which "
    r"[\d.]+ \w+ is free\. Including non-PyTorch memory, this process has [\d.]+ \w+ memory in use\. Of the "
    r"allocated memory [\d.]+ \w+ is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated\. If "
    r"reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    r"fragmentation\.  See documentation for Memory Management  \(https://docs\.pytorch\.org/\S+\)"
)


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (1, "1 bytes"),
        (KIB, "1024 bytes"),
        (KIB + 1, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (3 * MIB // 2, "1.50 MiB"),
        (20 * MIB, "20.00 MiB"),
        (2 * GIB, "2.00 GiB"),
        (TIB, "1024.00 GiB"),
    ],
)
def test_the_error_reads_like_pytorchs(size, written):
    error = out_of_memory(size, 3 * GIB, GIB)
    start = f"Tried to allocate {written}. GPU 0 has a total capacity of 3.00 GiB of which 2.00 GiB is free."
    assert WORDING.fullmatch(str(error))
    assert start in str(error)
    assert is_oom(error)
    assert not is_fragmented(error)


@pytest.mark.parametrize("refuse_first", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_each_phase_can_run_out_and_gives_everything_back(phase, refuse_first):
    peaks = {}
    model, batch = model_and_batch()
    with StorageMeter() as meter:

        def note(phase):
            peaks[phase] = meter.peak_bytes
            meter.reset_peak()

        train(model, batch, torch.optim.Adam(model.parameters()), after=note)

    model, batch = model_and_batch()
    optimizer, done = torch.optim.Adam(model.parameters()), []
    with StorageMeter() as truth, StorageMeter(peaks[phase] - 1, refuse_first=refuse_first) as meter:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(model, batch, optimizer, after=done.append)

        assert [*done, phase] == list(peaks)[: len(done) + 1]
        words = re.compile(r"CPU out of memory\. Tried to allocate .* that may be used\.") if refuse_first else WORDING
        assert words.fullmatch(str(caught.value))
        assert meter.peak_bytes <= meter.capacity_bytes
        assert meter.live_bytes == truth.live_bytes  # nothing refused is held by the error
        del caught
        optimizer.state.clear()
        optimizer.zero_grad()
        assert meter.live_bytes == truth.live_bytes == 0


def test_a_refused_result_is_dead_while_the_error_is_held():
    made = []

    class Watch(StorageMeter):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            made.append(weakref.ref(result))
            return result

    with Watch(), StorageMeter(ROW), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * KIB)
    assert made[0]() is None
    assert caught.value is not None


def test_the_first_of_several_results_is_given_back_with_the_refused_one():
    x = row()
    with StorageMeter(4) as meter:  # the greatest value fits, its index does not
        with pytest.raises(torch.OutOfMemoryError, match="allocate 8 bytes"):
            x.max(0)
        assert meter.live_bytes == 0


def test_every_allocation_of_a_step_can_fail_once():
    model, batch = model_and_batch(4)

    def step():
        train(model, batch, torch.optim.Adam(model.parameters(), foreach=False))
        model.zero_grad()

    with StorageMeter() as meter:
        step()
    total = meter.allocations
    assert total > 30
    for n in range(1, total + 1):
        with StorageMeter(fail_at=n) as meter:
            with pytest.raises(torch.OutOfMemoryError, match="of which 0 bytes is free"):
                step()
            model.zero_grad()
            assert (meter.allocations, meter.live_bytes) == (n, 0)
            step()
            assert (meter.allocations, meter.live_bytes) == (n + total, 0)
    with StorageMeter(fail_at=total + 1):
        step()


def test_growing_fails_like_any_allocation():
    with StorageMeter(fail_at=2), pytest.raises(torch.OutOfMemoryError):
        row().resize_(2 * KIB)
    with StorageMeter(2 * ROW), pytest.raises(torch.OutOfMemoryError, match=r"allocate 8\.00 KiB"):
        row().resize_(2 * KIB)


# Refused before a byte is touched.

HUGE = 100 * TIB // 4  # floats
many = row(requires_grad=False)[:1].expand(HUGE)  # takes 4 KiB
square = torch.ones(1).expand(10**7)

HUGE_OPERATIONS = {
    "empty": lambda: torch.empty(HUGE),
    "empty, by a device": lambda: torch.empty(HUGE, device="cpu"),
    "zeros": lambda: torch.zeros(HUGE),
    "full": lambda: torch.full((HUGE,), 1.0),
    "arange": lambda: torch.arange(HUGE),
    "eye": lambda: torch.eye(10**7),
    "rand": lambda: torch.rand(HUGE),
    "randperm": lambda: torch.randperm(HUGE),
    "bernoulli": lambda: torch.bernoulli(many, generator=torch.Generator()),
    "dropout": lambda: functional.dropout(many),
    "new_empty": lambda: square.new_empty(HUGE),
    "clone": lambda: many.clone(memory_format=torch.contiguous_format),
    "to": lambda: many.to(torch.float64, memory_format=torch.contiguous_format),
    "exp": many.exp,
    "add": lambda: many + 1,
    "outer": lambda: torch.outer(square, square),
    "matmul": lambda: square[:, None] @ square[None],
    "addmm": lambda: torch.addmm(square[:1], square[:, None], square[None]),
    "cat": lambda: torch.cat([many, many]),
    "stack": lambda: torch.stack([many, many]),
    "pad": lambda: functional.pad(square, (0, HUGE)),
    "repeat": lambda: square[:1].repeat(HUGE),
    "one_hot": lambda: functional.one_hot(torch.zeros(1, dtype=torch.long), HUGE),
    "index": lambda: many[torch.zeros(1, dtype=torch.long).expand(HUGE)],
    "resize_": lambda: torch.empty(0).resize_(HUGE),
    "out=": lambda: torch.add(many, 1, out=torch.empty(0)),
    "foreach": lambda: torch._foreach_add([square, many], 1.0),
    "max": lambda: many[None].expand(3, -1).max(0),
}


@pytest.mark.parametrize("operation", HUGE_OPERATIONS.values(), ids=HUGE_OPERATIONS)
def test_what_no_machine_could_hold_is_refused_before(operation):
    with StorageMeter(GIB, refuse_first=True) as meter, pytest.raises(torch.OutOfMemoryError):
        operation()
    assert meter.peak_bytes < KIB


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        (lambda: row().nonzero(), 8 * KIB),
        (lambda: row()[row() > 0], 4 * KIB),
        (lambda: row().masked_select(row() > 0), 4 * KIB),
        (lambda: torch.unique(torch.arange(KIB)), 8 * KIB),
    ],
    ids=["nonzero", "mask", "masked_select", "unique"],
)
def test_a_size_that_depends_on_values_is_counted_afterwards(operation, size):
    with StorageMeter(MIB, refuse_first=True) as meter:
        kept = operation()
        assert meter.live_bytes == kept.nbytes == size
    with StorageMeter(size - 1, refuse_first=True), pytest.raises(torch.OutOfMemoryError):
        operation()


def convolution():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten()
    )
    return model.append(nn.LazyLinear(4)), torch.randn(4, 3, 12, 12)


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.Sequential(nn.Linear(8, 16), layer, nn.LayerNorm(16)), torch.randn(2, 6, 8)


def recurrent():
    return nn.Sequential(nn.Embedding(9, 8), nn.LSTM(8, 8)), torch.randint(0, 9, (5, 3))


@pytest.mark.parametrize("make", [convolution, transformer, recurrent])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_refusing_first_changes_no_result_and_no_count(make, optimizer):
    def run(meter):
        torch.manual_seed(0)
        model, batch = make()
        with meter:
            trained = None
            for _ in range(2):
                result = model(batch)
                loss = (result[0] if isinstance(result, tuple) else result).square().mean()
                trained = trained or optimizer(model.parameters(), lr=0.1)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                trained.step()
                trained.zero_grad()
        return [*model.state_dict().values(), loss.detach(), torch.rand(3)], (meter.peak_bytes, meter.allocations)

    (plain, counts), (first, first_counts) = run(StorageMeter()), run(StorageMeter(TIB, refuse_first=True))
    torch.testing.assert_close(first, plain, rtol=0, atol=0)
    assert first_counts == counts
    with StorageMeter(counts[0] - 1, refuse_first=True) as meter, pytest.raises(torch.OutOfMemoryError):
        run(meter)


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["default", "own"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda generator: torch.rand(KIB, generator=generator),
        lambda generator: torch.bernoulli(torch.full((KIB,), 0.5), generator=generator),
        lambda generator: torch.empty(KIB).normal_(generator=generator),
        lambda generator: torch.multinomial(torch.ones(KIB), 5, generator=generator),
    ],
    ids=["rand", "bernoulli", "normal_", "multinomial"],
)
def test_refusing_first_takes_no_random_numbers(operation, generator):
    source = generator or torch.default_generator
    source.manual_seed(1)
    expected = operation(generator)

    source.manual_seed(1)
    with StorageMeter(1, refuse_first=True), pytest.raises(torch.OutOfMemoryError):
        operation(generator)
    with StorageMeter(MIB, refuse_first=True):
        actual = operation(generator)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_an_operation_without_tensors_runs_once():
    calls = []

    @torch.library.custom_op("oomguard_tests::make", mutates_args=())
    def make(length: int) -> torch.Tensor:
        calls.append(length)
        return torch.zeros(length)

    with StorageMeter(TIB, refuse_first=True) as meter:
        make(KIB)
    assert (calls, meter.peak_bytes) == ([KIB], ROW)


def test_what_is_made_elsewhere_is_not_refused():
    far = torch.ones(1, device="meta").expand(HUGE)
    with StorageMeter(1, refuse_first=True) as meter:
        assert torch.empty(HUGE, device="meta").numel() == (far + 1).numel() == HUGE
    assert meter.allocations == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda tensors: torch._foreach_add_(tensors, 1.0),
        torch._foreach_zero_,
        lambda tensors: torch._foreach_copy_(tensors, [torch.ones(2), torch.ones(2)]),
        lambda tensors: torch._foreach_lerp_(tensors, [torch.ones(2), torch.ones(2)], 0.5),
    ],
    ids=["add", "zero", "copy", "lerp"],
)
def test_writes_to_a_list_are_counted_as_they_are_without_a_simulation(write):
    tensors = [torch.zeros(2), torch.zeros(2)]

    with StorageMeter():
        write(tensors)

    assert [tensor._version for tensor in tensors] == [1, 1]
