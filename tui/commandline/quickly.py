"""Libraries loaded without what they take along and no command needs: a tenth of a command's start each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    """Without `typing_extensions`, which it takes wherever that is installed.

    What msgspec wants of it Python has had by itself since 3.11.
    """
    # As documented for `sys.modules`: None there makes the import fail.
    with _in_place_of("typing_extensions", None):
        import msgspec  # noqa: F401


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
