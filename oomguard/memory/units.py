"""Bytes: read from what people write, printed as people read them."""

from __future__ import annotations

import re

_FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)\s*")


def parse_bytes(value: int | str, *, name: str = "capacity") -> int:
    """
    Return *value* as a number of bytes.

    Args:
        value: A positive whole number of bytes, or a text such as ``"64MiB"`` or
            ``"8 GiB"``; the units are B, KiB, MiB, GiB and TiB, powers of 1024.
        name: What the value is for, named in the error.

    Raises:
        ValueError: *value* is not positive, or has no unit or another one.
        TypeError: *value* is neither a whole number nor a text.

    Example:
        >>> parse_bytes("64MiB"), parse_bytes("1.5 KiB"), parse_bytes(512)
        (67108864, 1536, 512)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"oomguard: {name} is bytes: an int or a text like '8 GiB', not {value!r}")
    if isinstance(value, int):
        size = value
    else:
        written = _WRITTEN.fullmatch(value)
        if written is None:
            units = ", ".join(_FACTORS)
            raise ValueError(f"oomguard: {name}={value!r} is no size; write a number and one of {units}, like '8 GiB'")
        size = int(float(written[1]) * _FACTORS[written[2]])
    if size <= 0:
        raise ValueError(f"oomguard: {name} must be at least 1 byte, got {value!r}")
    return size


def format_bytes(size_bytes: int) -> str:
    """
    Return *size_bytes* in the largest unit that leaves a number of at least 1.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(2**34)
        ('0 B', '1.50 KiB', '16.00 GiB')
    """
    for unit, factor in reversed(_FACTORS.items()):
        if abs(size_bytes) >= factor > 1:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} B"
