"""Whether libaio is there, which DeepSpeed's NVMe offload is compiled against."""

from __future__ import annotations

import ctypes.util
import os
import sys
from pathlib import Path


def libaio() -> str | None:
    """The library's file name; None when it or its header is not there."""
    library = ctypes.util.find_library("aio")
    header = any((Path(folder) / "libaio.h").is_file() for folder in _header_folders())
    return library if header else None


def _header_folders() -> list[str]:
    """Where a compiler looks: the system's folders, the environment's own, and what its variables add."""
    listed = (os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"))
    added = [folder for folders in listed for folder in folders.split(os.pathsep) if folder]
    return ["/usr/include", "/usr/local/include", str(Path(sys.prefix) / "include"), *added]
