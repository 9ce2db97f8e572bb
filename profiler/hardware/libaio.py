"""Whether libaio is there, which DeepSpeed's NVMe offload is compiled against, and where."""

from __future__ import annotations

import ctypes.util
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_SYSTEM_HEADERS = ("/usr/include", "/usr/local/include")
_HEADER_LISTS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
_LIBRARY_LISTS = ("LIBRARY_PATH", "LD_LIBRARY_PATH")


def libaio(environment: Mapping[str, str] = os.environ) -> str | None:
    """The library's file name; None when it or its header is not there."""
    library = ctypes.util.find_library("aio") or _library_of_prefix(environment)
    header = any((Path(folder) / "libaio.h").is_file() for folder in _header_folders(environment))
    return library if header else None


def libaio_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Variable to the folder that it lacks for a libaio that only CFLAGS and LDFLAGS lead to.

    DeepSpeed tests for the library with these two, but torch compiles the op without them, and the
    finished op is loaded without them: compiler, linker and loader each have a list of their own.
    """
    added: dict[str, str] = {}
    header = _first(_flags(environment, "CFLAGS", "-I"), "libaio.h")
    library = _first(_flags(environment, "LDFLAGS", "-L"), "libaio.so")
    if header and header not in _listed(environment, _HEADER_LISTS):
        added["CPATH"] = header
    for variable in _LIBRARY_LISTS:
        if library and library not in _listed(environment, (variable,)):
            added[variable] = library
    return added


def _library_of_prefix(environment: Mapping[str, str]) -> str | None:
    folders = (*_flags(environment, "LDFLAGS", "-L"), *_listed(environment, _LIBRARY_LISTS))
    folder = _first(folders, "libaio.so")
    return str(Path(folder) / "libaio.so") if folder else None


def _header_folders(environment: Mapping[str, str]) -> Iterable[str]:
    """Where a compiler looks: the system's folders, the environment's own, and what its variables add."""
    yield from _SYSTEM_HEADERS
    yield str(Path(sys.prefix) / "include")
    yield from _listed(environment, _HEADER_LISTS)
    yield from _flags(environment, "CFLAGS", "-I")


def _listed(environment: Mapping[str, str], variables: Iterable[str]) -> list[str]:
    texts = (environment.get(name, "") for name in variables)
    return [folder for text in texts for folder in text.split(os.pathsep) if folder]


def _flags(environment: Mapping[str, str], variable: str, flag: str) -> list[str]:
    """The folders behind `-I` or `-L`, joined to it or the next word."""
    try:
        words = shlex.split(environment.get(variable, ""))
    except ValueError:
        return []  # an open quote, which the compiler will not read either
    joined = [word[len(flag) :] for word in words if word.startswith(flag) and word != flag]
    apart = [after for word, after in zip(words, words[1:], strict=False) if word == flag]
    return joined + apart


def _first(folders: Iterable[str], file: str) -> str | None:
    return next((folder for folder in folders if (Path(folder) / file).is_file()), None)
