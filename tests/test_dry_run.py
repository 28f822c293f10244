"""`python -m oomguard dry-run`: whether a script's memory would do, and what fills it."""

import subprocess
import sys
import textwrap

import pytest
import torch
from fakes import needs_fake_gpu

from oomguard.__main__ import main
from oomguard.testing import fake_gpu
from oomguard.testing.dry_run import DeviceRecord, DryRun, Row, dry_run
from oomguard.testing.recorder import BEFORE, NOT_FROM_PYTHON, Life, Recorder, run

GIB = 2**30

TRAIN = """
import sys
import torch


def loss_of(weight, size):
    x = torch.randn(size, 2**26, device="cuda")
    return (weight * x).square().sum()


weight = torch.nn.Parameter(torch.zeros(2**26, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    loss = loss_of(weight, int(sys.argv[1]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""


@pytest.fixture
def shell(tmp_path):
    """Write a script, run the command on it in its folder, and return the finished process."""

    def shell(text, *words, before=("--capacity", "4GiB", "--"), name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "oomguard", "dry-run", *before, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return shell


NOTE = """
Kernels were not run and values are zeros: losses and metrics above mean nothing. A real card needs some
more than this: workspaces that cuDNN and cuBLAS choose there, and whatever else runs on it.
"""


@needs_fake_gpu
def test_a_script_that_fits_says_what_fills_the_device(shell):
    done = shell(TRAIN, "train.py", "2")

    assert done.returncode == 0
    assert done.stderr == ""
    assert (
        done.stdout
        == """\
loss 0.0
loss 0.0
loss 0.0

oomguard dry run: train.py 2 fits.

GPU 0
  capacity            4.00 GiB
  CUDA context        0.29 GiB  (assumed)
  peak reserved       2.75 GiB   69 %
  peak allocated      2.75 GiB   69 %

  alive at the peak
    1.50 GiB   55 %  3 blocks  backward pass
    0.50 GiB   18 %  2 blocks  train.py:8     return (weight * x).square().sum()
    0.50 GiB   18 %  1 block   train.py:7     x = torch.randn(size, 2**26, device="cuda")
    0.25 GiB    9 %  1 block   train.py:11    weight = torch.nn.Parameter(torch.zeros(2**26, device="cuda"))
"""
        + NOTE
    )


@needs_fake_gpu
def test_a_script_that_does_not_fit_says_where_and_what_was_alive(shell):
    done = shell(TRAIN, "train.py", "6")

    assert done.returncode == 1
    assert "Traceback (most recent call last):" in done.stderr
    assert "recorder.py" not in done.stderr
    assert (
        done.stdout
        == """
oomguard dry run: train.py 6 runs out of memory.

  train.py:8 in loss_of
      return (weight * x).square().sum()
  OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.

GPU 0
  capacity            4.00 GiB
  CUDA context        0.29 GiB  (assumed)
  peak reserved       3.25 GiB   81 %
  peak allocated      3.25 GiB   81 %

  alive when memory ran out
    1.50 GiB   46 %  1 block   train.py:8   return (weight * x).square().sum()
    1.50 GiB   46 %  1 block   train.py:7   x = torch.randn(size, 2**26, device="cuda")
    0.25 GiB    8 %  1 block   train.py:11  weight = torch.nn.Parameter(torch.zeros(2**26, device="cuda"))
"""
        + NOTE
    )


@needs_fake_gpu
def test_errors_that_the_script_handles_are_counted(shell):
    done = shell(
        """
import torch
for device in range(torch.cuda.device_count()):
    kept = torch.empty(2**20, device=f"cuda:{device}")
    try:
        torch.empty(2**40, device=f"cuda:{device}")
    except torch.OutOfMemoryError:
        print("handled")
""",
        "train.py",
        before=("--capacity", "2GiB", "--device-count", "2", "--"),
    )

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[:2] == ["handled", "handled"]
    assert "oomguard dry run: train.py fits. It handled 2 out-of-memory errors itself." in lines
    assert [line for line in lines if line.startswith("GPU")] == ["GPU 0", "GPU 1"]


@needs_fake_gpu
@pytest.mark.parametrize(
    ("text", "words", "status", "said"),
    [
        (
            "import helper\nhelper.fail()",
            ["train.py"],
            1,
            (
                "oomguard dry run: train.py fails, but not for want of memory.\n\n"
                "  helper.py:2 in fail\n      raise KeyError('no such layer')\n  KeyError: 'no such layer'\n"
                "It used no GPU in its own process; processes that it starts are not recorded.\n"
            ),
        ),
        (
            "import sys\nsys.exit(5)",
            ["train.py"],
            5,
            (
                "oomguard dry run: train.py ended with status 5 of its own.\n"
                "It used no GPU in its own process; processes that it starts are not recorded.\n"
            ),
        ),
        (
            "import sys\nprint(sys.argv[1:], __name__)\nsys.exit(0)",
            ["-m", "train", "--lr", "1", "--", "x"],
            0,
            (
                "['--lr', '1', '--', 'x'] __main__\n\noomguard dry run: -m train --lr 1 -- x runs.\n"
                "It used no GPU in its own process; processes that it starts are not recorded.\n"
            ),
        ),
        (
            "import os\nos._exit(9)",
            ["train.py"],
            9,
            "oomguard dry run: train.py ended with status 9 and left no record: it was killed, or left by os._exit.\n"
            + NOTE,
        ),
    ],
    ids=["an error", "a status", "a module", "no record"],
)
def test_other_endings_keep_the_scripts_own_status(shell, tmp_path, text, words, status, said):
    (tmp_path / "helper.py").write_text("def fail():\n    raise KeyError('no such layer')\n")

    done = shell(text, *words)

    assert done.returncode == status
    assert done.stdout.lstrip("\n") == said


@needs_fake_gpu
def test_what_a_script_sets_before_it_imports_torch_counts(shell):
    done = shell(
        """
import os
import sys
assert "torch" not in sys.modules
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
import torch
x = torch.empty(2**20, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"])
""",
        "train.py",
    )

    assert done.stdout.startswith("True\n")


WRONG = {
    "no unit": (["--capacity", "24", "--", __file__], "oomguard: capacity='24' is no size; "),
    "no script": (["--capacity", "24GiB"], "oomguard: dry-run needs a script: python -m oomguard dry-run "),
    "no module": (["--capacity", "24GiB", "--", "-m"], "oomguard: dry-run needs a script: "),
    "no such script": (["--capacity", "24GiB", "--", "nowhere.py"], "oomguard: there is no script 'nowhere.py'\n"),
    "no device": (
        ["--capacity", "24GiB", "--device-count", "0", "--", __file__],
        "oomguard: there can be 1 to 16 fake GPUs, got 0 capacities\n",
    ),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_one_sentence(capsys, words, message):
    assert main(["dry-run", *words]) == 2

    assert capsys.readouterr().err.startswith(message)


def test_where_there_is_no_fake_gpu_the_reason_is_said(capsys, monkeypatch):
    monkeypatch.setattr(fake_gpu, "why_not", lambda: "the fake GPU needs a miracle")

    assert main(["dry-run", "--capacity", "24GiB", "--", __file__]) == 2
    assert capsys.readouterr().err == "oomguard: the fake GPU needs a miracle\n"


def test_python_says_what_it_returns():
    with pytest.raises(ValueError, match=r"^oomguard: dry-run needs a script"):
        dry_run([])


# ---- the record, without a device ---------------------------------------------------------


def test_the_report_folds_what_is_small_and_says_what_is_lost():
    rows = tuple(Row(f"/very/long/{'x' * 40}/train.py:{i}", "", GIB >> i, 2) for i in range(14))
    record = DeviceRecord(1, 4 * GIB, 2 * GIB, 3 * GIB, at_oom=False, overflowed=True, rows=rows)
    fitted = DryRun(("train.py",), "ran", 0, None, None, None, 0, (record,))

    lines = str(fitted).splitlines()

    assert lines[8:] == [
        "  alive at the peak",
        *(
            f"{2**-i:8.2f} GiB  {100 / 1.99988 / 2**i:3.0f} %   2 blocks  ...{'x' * 26}/train.py:{i}"
            for i in range(7)  # half a percent of the whole is the least that has its line
        ),
        "    0.02 GiB    1 %  14 blocks  7 smaller lines",
        "  (of the last 200,000 events; the first are no longer known)",
        *NOTE.rstrip().splitlines(),
    ]


def frame(file, line):
    return {"filename": file, "line": line, "name": "f"}


RUNS_OUT = 'import torch\nraise torch.OutOfMemoryError("CUDA out of memory.\\nTried")'
ENDINGS = {
    "the end": ("pass", {"outcome": "ran", "status": 0}),
    "exit 0": ("import sys\nsys.exit()", {"outcome": "ran", "status": 0}),
    "exit 3": ("import sys\nsys.exit(3)", {"outcome": "exited", "status": 3}),
    "exit with words": ("import sys\nsys.exit('no data')", {"outcome": "exited", "status": 1}),
    "an error": (
        "def f():\n    {}[5]\nf()",
        {"outcome": "failed", "status": 1, "place": ("train.py:2", "f"), "error": "KeyError: 5"},
    ),
    "an interrupt": (
        "raise KeyboardInterrupt",
        {"outcome": "failed", "status": 130, "place": ("train.py:1", "<module>"), "error": "KeyboardInterrupt: "},
    ),
    "memory": (
        RUNS_OUT,
        {
            "outcome": "ran out",
            "status": 1,
            "place": ("train.py:2", "<module>"),
            "error": "OutOfMemoryError: CUDA out of memory.",
        },
    ),
}


@pytest.mark.parametrize(("text", "ended"), ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]], ids=["a script", "a module"])
def test_every_ending_is_told(tmp_path, monkeypatch, capsys, text, ended, words):
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)

    seen = run([*words, "--lr", "1"], Recorder(str(tmp_path)))

    if "place" in seen:
        seen["place"] = (seen["place"][0].removeprefix(f"{tmp_path}/"), seen["place"][1])
    assert seen == ended
    assert sys.argv[1:] == ["--lr", "1"]
    assert sys.path[0] == str(tmp_path)
    error = capsys.readouterr().err
    assert ("Traceback" in error) is ("error" in ended)
    assert "runpy" not in error
    assert (error == "no data\n") is ("no data" in text)


@pytest.fixture
def recorder(monkeypatch):
    """A recorder of a script in /work, on a device where a block of 1024 bytes at 1 is alive."""
    recorder = Recorder("/work")
    monkeypatch.setattr(recorder, "_alive_now", lambda device: {1: Life(-1, sys.maxsize, 1024, "/work/model.py:1")})
    return recorder


def test_the_peak_is_found_from_the_events_and_from_what_is_left(recorder):
    events = [
        {"action": "free_requested", "addr": 9, "size": 5000},  # there from the beginning
        {"action": "alloc", "addr": 2, "size": 500, "frames": [frame(torch.__file__, 7), frame("/work/train.py", 3)]},
        {"action": "alloc", "addr": 3, "size": 512, "frames": []},
        {"action": "oom", "device_free": 0, "size": 5},
        {"action": "free_requested", "addr": 3, "size": 512},
        {"action": "free_completed", "addr": 3, "size": 512},
        {"action": "free_requested", "addr": 2, "size": 500},
    ]

    assert recorder._at_peak(0, events) == {(BEFORE, 5120): 1, ("/work/model.py:1", 1024): 1}
    assert recorder._at_peak(0, events[1:]) == {
        ("/work/train.py:3", 512): 1,
        (NOT_FROM_PYTHON, 512): 1,
        ("/work/model.py:1", 1024): 1,
    }


def test_own_lines_are_told_from_those_of_libraries(recorder):
    inside = Recorder(torch.__path__[0])  # python -m torch.something

    assert recorder.is_own("/work/train.py")
    assert not recorder.is_own(torch.__file__)
    assert not recorder.is_own(subprocess.__file__)
    assert not recorder.is_own("<frozen runpy>")
    assert not recorder.is_own("/tmp/torchinductor_me/ab/cab.py")
    assert inside.is_own(torch.__file__)
