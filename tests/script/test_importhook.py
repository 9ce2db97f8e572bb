"""What the hook does to a Python process: next to nothing, and nothing that the script could notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtop.profiler.record.scriptevents import HOOKED_RUN
from llmtop.trainer.script.hookenv import SITE, script_environment
from tests.script.watching import SCRIPTS

HEAVY = {"torch", "msgspec", "deepspeed", "numpy", "llmtop.profiler.record.rundir"}


def python(text: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(folder)]), **more}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120, cwd=folder
    )


def test_the_hook_lies_where_the_supervisor_says() -> None:
    assert [path.name for path in SITE.iterdir() if path.suffix == ".py"] == ["sitecustomize.py"]


def test_python_starts_with_nothing_heavy(tmp_path: Path) -> None:
    done = python("import sys; print(*sys.modules)", tmp_path, **{HOOKED_RUN: str(tmp_path)})
    loaded = set(done.stdout.split())
    assert "llmtop.profiler.probes.script.importhook" in loaded
    assert not loaded & HEAVY and not done.stderr


def test_without_a_run_nothing_is_installed(tmp_path: Path) -> None:
    done = python("import sys; print(*sys.modules)", tmp_path)
    assert "llmtop.profiler.probes.script.importhook" not in done.stdout.split()


def test_the_machines_own_sitecustomize_is_loaded_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.own = 'loaded'")
    done = python("print(own); import sitecustomize; print(sitecustomize.__file__)", tmp_path)
    assert done.stdout.splitlines() == ["loaded", str(tmp_path / "sitecustomize.py")]


def test_an_error_in_it_shows_as_it_would_without(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import no_such_module")
    assert "no_such_module" in python("", tmp_path).stderr


def test_an_interpreter_without_llmtop_says_so_and_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        # Without the folder of the installed packages, as another environment is.
        [sys.executable, "-S", "-c", "import sitecustomize; print('on')"],
        env={**os.environ, HOOKED_RUN: str(tmp_path), "PYTHONPATH": str(SITE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "on\n"
    assert "not watched from inside" in done.stderr and "install llmtop-deepspeed" in done.stderr


MODULE = """
import sys
from llmtop.profiler.probes.script import importhook
sys.meta_path.insert(0, importhook.Waiting({"watched_module": "no_such_function"}))
import watched_module
loaders = watched_module.__spec__.loader, watched_module.__loader__
print(watched_module.value, *(type(loader).__name__ for loader in loaders))
import inspect
print(inspect.getsource(watched_module).strip())
"""


def test_a_watched_module_looks_as_ever_and_a_failing_hook_is_told(tmp_path: Path) -> None:
    (tmp_path / "watched_module.py").write_text("value = 7")
    done = python(MODULE, tmp_path)
    assert done.stdout.splitlines() == ["7 SourceFileLoader SourceFileLoader", "value = 7"]
    assert "not watched from inside: AttributeError" in done.stderr


def test_a_watched_module_that_fails_to_import_raises_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "watched_module.py").write_text("1 / 0")
    assert "ZeroDivisionError" in python(MODULE, tmp_path).stderr


def test_the_environment_keeps_what_was_there() -> None:
    class Run:
        run_id = "a"
        path = Path("/runs/a")

    made = script_environment(Run(), {"PYTHONPATH": "/mine", "HOME": "/h"})  # type: ignore[arg-type]
    assert made["PYTHONPATH"] == f"{SITE}{os.pathsep}/mine" and made["HOME"] == "/h"


@pytest.mark.slow
def test_a_probe_that_fails_leaves_the_script_alone(tmp_path: Path) -> None:
    """A run whose folder cannot be written: the script runs as if nobody watched."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "plain.py")],
        env={**os.environ, HOOKED_RUN: str(tmp_path / "gone"), "PYTHONPATH": str(SITE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0
    assert "llmtop: this process is not watched from inside" in done.stderr
