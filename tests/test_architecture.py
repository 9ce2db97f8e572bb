"""What each entry point really loads, seen from a fresh interpreter, and what the built wheel holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from llmtop.profiler.record.bookmarking import Bookmarker
from tests.recorded import make_recorded_run

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("presets", "profiler", "trainer", "tui")
TORCH_FAMILY = {"torch", "deepspeed", "transformers", "tokenizers", "safetensors", "peft", "bitsandbytes"}
SLOW_TO_LOAD = {
    *("asyncio", "subprocess", "socket", "threading", "email", "importlib.metadata", "urllib.request"),
    *("shutil", "zipfile", "json", "statistics", "difflib", "inspect", "psutil", "pynvml"),
}
"""What a command that answers at once has no use for."""
OTHER_QUESTIONS = {
    *("llmtop.profiler.cost.sweep", "llmtop.profiler.cost.where", "llmtop.profiler.memory.loading"),
    *("llmtop.profiler.memory.explain", "llmtop.profiler.hardware.nvml", "llmtop.profiler.record.events"),
    *("llmtop.tui.commands.plan_load", "llmtop.tui.commands.plan_search", "llmtop.tui.commands.plan_explain"),
}
"""Of `llmtop plan`."""
SCREEN_FAMILY = {"textual", "rich", "textual_plotext", "plotext"}


def loaded_by(code: str, folder: Path) -> set[str]:
    """Top-level names and llmtop modules that a fresh interpreter loads to run `code`."""
    environment = {**os.environ, "LLMTOP_RUNS_DIR": str(folder / "runs"), "XDG_CONFIG_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "import time:" in line}
    return names | {name.split(".")[0] for name in names}


def command(*words: str) -> str:
    return f"from llmtop.tui.cli import main; raise SystemExit(main({list(words)!r}))"


def test_help_loads_only_the_standard_library(tmp_path: Path) -> None:
    loaded = loaded_by(command("--help"), tmp_path)
    assert "llmtop.tui.cli" in loaded
    assert not loaded & {"msgspec", "psutil", "pynvml", "argparse", *TORCH_FAMILY, *SCREEN_FAMILY}


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "cpu-demo", "--json"),
        ("plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8"),
        ("plan", "--help"),
        ("presets",),
        ("ls", "--json"),
        ("compare", "--help"),
        ("import", "ds.json", "--json"),
        ("doctor", "--json"),
        ("quantize", "--help"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_commands_load_neither_torch_nor_textual(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    loaded = loaded_by(command(*words), tmp_path)
    assert not loaded & (TORCH_FAMILY | SCREEN_FAMILY)
    assert ("hjson" in loaded) == (words[0] == "import"), "needed for DeepSpeed files only"


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8"), OTHER_QUESTIONS),
        (("plan", "cpu-demo", "--gpu", "cpu", "--json"), OTHER_QUESTIONS),
        (("plan", "--help"), OTHER_QUESTIONS),
        (("presets",), {"llmtop.profiler.memory.predict"}),
        (("ls",), {"tomllib", "llmtop.presets.catalog", "llmtop.presets.resolve"}),
    ],
    ids=("plan", "plan --json", "plan --help", "presets", "ls"),
)
def test_commands_that_answer_at_once_load_little(
    words: tuple[str, ...], more: set[str], tmp_path: Path
) -> None:
    kept = {"shutil"} if "--help" in words else set()  # asks the terminal how wide it is
    needless = loaded_by(command(*words), tmp_path) & (SLOW_TO_LOAD - kept | more)
    assert not needless


def test_runs_that_have_ended_are_listed_without_their_logs(tmp_path: Path) -> None:
    Bookmarker(make_recorded_run(tmp_path / "runs", steps=3)).finish()
    loaded = loaded_by(command("ls"), tmp_path)
    fold = {"llmtop.profiler.fold.folding", "llmtop.profiler.record.events"}
    assert "llmtop.profiler.record.bookmark" in loaded
    needless = loaded & (SLOW_TO_LOAD | fold)
    assert not needless


@pytest.mark.parametrize("what", ["monitor", "runs"])
def test_the_first_picture_is_painted_without_the_toolkit(what: str, tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", end=None, steps=3)
    begun = {
        "monitor": f'first_picture(RunDir.open(Path({str(run.path)!r})), read_only=False, leads_to="")',
        "runs": f"first_runs(Path({str(run.path.parent)!r}), read_only=False)",
    }[what]
    code = f"""
from pathlib import Path
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.first import terminal
terminal._size = lambda environ: (100, 40)
terminal.colours_of = lambda environ: 256
terminal.TakenTerminal.__init__ = lambda self: None
terminal.TakenTerminal.give_back = lambda self: None
terminal.TakenTerminal.paint = lambda self, picture: print(picture)
terminal.TakenTerminal.handed_over = True
with terminal.{begun} as first:
    assert first.terminal is not None
"""
    assert not loaded_by(code, tmp_path) & SCREEN_FAMILY


@pytest.mark.parametrize(
    "module", ["llmtop.tui.app", "llmtop.tui.commands.run", "llmtop.tui.commands.attach"]
)
def test_the_app_loads_no_torch(module: str, tmp_path: Path) -> None:
    assert not loaded_by(f"import {module}", tmp_path) & TORCH_FAMILY


@pytest.mark.parametrize(
    "module", ["llmtop.trainer.supervise", "llmtop.trainer.launch", "llmtop.trainer.control"]
)
def test_the_supervisor_loads_neither_torch_nor_textual(module: str, tmp_path: Path) -> None:
    assert not loaded_by(f"import {module}", tmp_path) & (TORCH_FAMILY | SCREEN_FAMILY)


def test_every_package_marker_is_empty() -> None:
    for package in PACKAGES:
        for marker in (ROOT / package).rglob("__init__.py"):
            assert marker.read_text() == "", f"{marker}: nothing happens at import"


def test_wheel_and_sdist_hold_every_module_and_preset(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t", "wheel", "-t", "sdist"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".toml", ".typed", ".css") and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".toml") for name in sources)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert {f"llmtop/{name}" for name in sources} <= set(wheel.namelist())
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert sources | {"pyproject.toml", "README.md", "LICENSE"} <= held
    assert not any(name.startswith((".dev", ".venv")) for name in held)
