"""Libraries that are loaded without a part of them are whole all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest


def told_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_pathlib_still_spells_a_path_as_an_address() -> None:
    told = told_by(
        "import sys; from llmtop.tui.commandline import quickly\n"
        "loaded = 'pathlib' in sys.modules; quickly.import_pathlib()\n"
        "from pathlib import Path\n"
        "print(loaded, 'urllib.parse' in sys.modules, Path('/a b').as_uri())\n"
        "import urllib.parse; print(urllib.parse.unquote('a%20b'))"
    )
    assert told.splitlines()[0] in ("False False file:///a%20b", "True False file:///a%20b")
    assert told.splitlines()[1] == "a b"


@pytest.mark.parametrize(
    "call, name",
    [
        ("import_pathlib", "urllib.parse"),
        ("import_msgspec", "typing_extensions"),
        ("import_msgspec", "platform"),
        ("import_argparse", "gettext"),
    ],
)
def test_what_was_loaded_before_stays(call: str, name: str) -> None:
    told = told_by(
        f"import sys, {name} as before; from llmtop.tui.commandline import quickly\n"
        f"quickly.{call}(); print(sys.modules[{name!r}] is before)"
    )
    assert told == "True"


def test_what_asks_for_the_system_and_for_translations_still_works() -> None:
    told = told_by(
        "import sys; from llmtop.tui.commandline import quickly\n"
        "quickly.import_msgspec(); quickly.import_argparse()\n"
        "print(sorted({'platform', 'gettext', 'typing_extensions'} & set(sys.modules)))\n"
        "import argparse, gettext, platform, uuid\n"
        "parser = argparse.ArgumentParser(prog='x'); parser.add_argument('--a', choices=['b'])\n"
        "print(platform.machine() != '', uuid.uuid4().version, gettext.gettext('a'), parser.format_usage())"
    )
    assert told.splitlines() == ["[]", "True 4 a usage: x [-h] [--a {b}]"]


def test_a_plan_of_a_named_gpu_loads_no_library_that_it_does_not_need() -> None:
    told = told_by(
        "import sys; from llmtop.tui.cli import main\n"
        "main(['plan', '--model', 'llama-3.1-8b', '--gpu', 'h100-80gb'])\n"
        "slow = ('tomllib', 'urllib.parse', 'locale', 'shlex', 'json', 'psutil', 'shutil', 'platform',"
        " 'importlib.metadata', 'llmtop.profiler.hardware.host')\n"
        "print(sorted(name for name in slow if name in sys.modules))"
    )
    assert told.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        ("leave(3)", "3 told"),
        ("import atexit; atexit.register(print, ', last words'); leave(3)", "3 told, last words"),
        (
            "import threading; threading.Thread(target=print, args=(', a thread',)).start(); leave(3)",
            "3 told, a thread",
        ),
        ("sys.settrace(lambda *_: None); leave(3)", "0 told, taken down"),
        ("sys.exit(4)", "4 told, taken down"),
    ],
    ids=["at once", "what was registered", "a thread", "traced", "no code"],
)
def test_a_process_ends_without_being_taken_down_once_all_is_done(meanwhile: str, told: str) -> None:
    code = (
        "import sys; from llmtop.tui.commandline import quickly\nleave = quickly.leaver()\n"
        "class Last:\n    def __init__(self): self.write = sys.stdout.write\n"
        "    def __del__(self): self.write(', taken down')\n"
        f"last = Last()\nsys.stdout.write('told')\n{meanwhile}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"{done.returncode} {done.stdout.strip()}" == told, done.stderr
