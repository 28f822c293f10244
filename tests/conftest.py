import matrix
import pytest

pytest_plugins = ["pytester"]
MATRIX = pytest.StashKey[dict[matrix.Cell, list[matrix.Point]]]()


def pytest_configure(config):
    config.stash[MATRIX] = {}


def pytest_collection_modifyitems(config, items):
    """Leave the full matrix to those who ask for it."""
    if "every_allocation" in config.option.markexpr:
        return
    full = [item for item in items if item.get_closest_marker("every_allocation")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in full]


@pytest.fixture
def judged(request):
    """Verdicts by cell, for the table at the end."""
    return request.config.stash[MATRIX]


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[MATRIX]:
        terminalreporter.section("out of memory at every allocation")
        terminalreporter.write_line(matrix.table(config.stash[MATRIX]))
