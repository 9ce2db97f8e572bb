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
    ("before", "ends_by_itself"),
    [
        ("", True),
        ("import atexit; atexit.register(print, 'last words')", False),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
    ],
    ids=["nothing waits", "something is to be done at the end", "a thread goes on"],
)
def test_a_process_ends_at_once_where_nothing_waits_for_it(before: str, ends_by_itself: bool) -> None:
    code = (
        f"import sys; from llmtop.tui.commandline import quickly\n{before}\n"
        "sys.stdout.write('told'); quickly.leave(3); print(', and went on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("told") and ("went on" not in done.stdout) == ends_by_itself
    assert ("last words" in done.stdout) == ("atexit" in before)
    assert done.returncode == (3 if ends_by_itself else 0)
