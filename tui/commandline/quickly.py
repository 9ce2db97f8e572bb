"""Starts and ends of a command without what none needs: parts of libraries, and Python's own taking down."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast


def import_pathlib() -> None:
    """Without `urllib.parse`, which it takes for `Path.as_uri` alone until Python 3.13."""
    stand_in = ModuleType("urllib.parse")
    vars(stand_in)["quote_from_bytes"] = _quote_from_bytes
    try:
        with _in_place_of("urllib.parse", stand_in):
            import pathlib  # noqa: F401
    except ImportError:  # of a Python that takes another name from there: then as it is meant
        import pathlib  # noqa: F401


def _quote_from_bytes(text: bytes) -> str:
    from urllib.parse import quote_from_bytes

    return quote_from_bytes(text)


def import_msgspec() -> None:
    """Without `typing_extensions`, which it takes wherever that is installed, and without `platform`, which
    Python's `uuid` asks for the name of the system alone.

    What msgspec wants of the former Python has had by itself since 3.11.
    """
    stand_in = ModuleType("platform")
    vars(stand_in)["system"] = _system
    try:
        # As documented for `sys.modules`: None there makes the import fail.
        with _in_place_of("typing_extensions", None), _in_place_of("platform", stand_in):
            import msgspec  # noqa: F401
    except (ImportError, AttributeError):  # of versions that want more: then as it is meant
        import msgspec  # noqa: F401


def _system() -> str:
    return os.uname().sysname


def import_argparse() -> None:
    """Without `gettext`: English alone, and none is looked for on the disk."""
    stand_in = ModuleType("gettext")
    vars(stand_in).update(gettext=str, ngettext=_ngettext)
    with _in_place_of("gettext", stand_in):
        import argparse  # noqa: F401


def _ngettext(one: str, many: str, count: int) -> str:
    return one if count == 1 else many


def module(name: str) -> ModuleType:
    """The module of that name, without `importlib`, whose package takes longer to load than most of ours."""
    __import__(name)
    return sys.modules[name]


def leaver() -> Callable[[int], None]:
    """What is told the exit code: the process ends with it as soon as all that waits for its end is done.

    To be called first: of what is registered for the end, the first is done last. Python would take down all
    that was loaded, which takes it 2 to 3 ms and is of use to nobody.
    """
    told: list[int] = []

    def end() -> None:
        # A debugger or a measurement of coverage was there before, and has its own last words to write.
        if not told or sys.gettrace() is not None or sys.getprofile() is not None:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(told[-1])

    atexit.register(end)
    return told.append


@contextmanager
def _in_place_of(name: str, stand_in: ModuleType | None) -> Iterator[None]:
    """The module is another one, unless it is there already."""
    modules: dict[str, object] = cast(dict[str, object], sys.modules)
    if name in modules:
        yield
        return
    modules[name] = stand_in
    try:
        yield
    finally:
        del modules[name]
