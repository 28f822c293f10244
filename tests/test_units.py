"""Bytes as people write and read them."""

import pytest

from oomguard.memory.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1, 1),
        ("1B", 1),
        ("64MiB", 64 * 2**20),
        ("8 GiB", 8 * 2**30),
        (" 1.5 KiB ", 1536),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read(written, size):
    assert parse_bytes(written) == size


@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        (
            "8 GB",
            ValueError,
            "capacity='8 GB' is no size; write a number and one of B, KiB, MiB, GiB, TiB, like '8 GiB'",
        ),
        ("GiB", ValueError, "capacity='GiB' is no size"),
        ("-1 GiB", ValueError, "capacity='-1 GiB' is no size"),
        (0, ValueError, "capacity must be at least 1 byte, got 0"),
        (-5, ValueError, "capacity must be at least 1 byte, got -5"),
        ("0.1B", ValueError, "capacity must be at least 1 byte, got '0.1B'"),
        (1.5, TypeError, "capacity is bytes: an int or a text like '8 GiB', not 1.5"),
        (True, TypeError, "capacity is bytes: an int or a text like '8 GiB', not True"),
        (None, TypeError, "capacity is bytes: an int or a text like '8 GiB', not None"),
    ],
)
def test_what_is_no_size_is_refused(written, error, message):
    with pytest.raises(error) as caught:
        parse_bytes(written)

    assert str(caught.value).startswith(f"oomguard: {message}")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**34, "16.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_sizes_are_shown(size, shown):
    assert format_bytes(size) == shown
