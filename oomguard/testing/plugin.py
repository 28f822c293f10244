"""
The pytest plugin: a marker that runs a test on a simulated device, and a fixture that is this device.

pytest loads it where oomguard is installed, and oomguard imports torch:
`pytest -p no:oomguard` does without both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oomguard.testing.simulate import Simulation

_MARKER = "oom_capacity"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(capacity=None, *, fail_at=None): run the test on a simulated device of this many bytes "
        "(an int or a text like '64MiB'), or with an out-of-memory error at the n-th allocation.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let marked tests use the fixture, whether they name it or not."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker(_MARKER) is not None and "oom_simulation" not in names:
            # A new list: the old one is shared with the test's other parameters, which may carry no marker.
            item.fixturenames = [*names, "oom_simulation"]  # type: ignore[attr-defined]


@pytest.fixture
def oom_simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    """
    Run the test on the simulated device of its `oom_capacity` marker, and give the device.

    It is entered after all other fixtures that the test names before it.
    """
    from oomguard.testing.simulate import simulate_oom  # noqa: PLC0415 - imports torch

    marker = request.node.get_closest_marker(_MARKER)
    if marker is None:
        pytest.fail(
            f"oomguard: the fixture oom_simulation needs a marker: @pytest.mark.{_MARKER}('64MiB') on the test",
            pytrace=False,
        )
    try:
        simulation = simulate_oom(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix("oomguard: ")
        pytest.fail(f"oomguard: @pytest.mark.{_MARKER}: {reason}", pytrace=False)
    with simulation:
        yield simulation
