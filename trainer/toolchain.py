"""What DeepSpeed's ops are compiled with: nvcc, a C++ compiler that it takes, ninja, Python's headers.

Nothing here imports torch. `mended` gives an environment in which what lies in an unusual place is
found; `build_problem` names the first thing that still stands in the way of an op.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.profiler.hardware.libaio import libaio_folders
from llmtop.trainer.folders import why_not_writable
from llmtop.trainer.ops import Op
from llmtop.trainer.supervisor.extensions import extensions_dir, op_library

TRITON_CACHE = "TRITON_CACHE_DIR"
_TOOLKITS = Path("/usr/local")
_TIMEOUT_SECONDS = 20.0
_GCC_BELOW: dict[tuple[int, int], int] = {
    (11, 0): 10,
    (11, 1): 11,
    (11, 4): 12,
    (12, 0): 13,
    (12, 3): 14,
    (12, 8): 15,
    (13, 0): 16,
}
"""From this CUDA release on, the first major version of gcc that its nvcc refuses (torch 2.13
`utils/cpp_extension.py:CUDA_GCC_VERSIONS`); what a release newer than 13.0 takes is not known."""
_NEWEST_KNOWN = (13, 0)
_OLDEST_GCC = 9
"""C++17 and C++20 need it."""


class Toolkit(Struct, frozen=True, kw_only=True):
    """The CUDA toolkit that torch will use."""

    home: str
    release: tuple[int, int] | None
    """Of its nvcc; None without one that runs."""
    chosen: bool
    """By the user, with CUDA_HOME or CUDA_PATH."""


def torch_cuda() -> str | None:
    """torch.version.cuda read from its file: importing torch would take seconds. None for a CPU build."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def toolkit(environment: Mapping[str, str], *, root: Path = _TOOLKITS) -> Toolkit | None:
    """As torch looks for it: CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda."""
    chosen = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if chosen:
        return Toolkit(home=chosen, release=_nvcc_release(Path(chosen), environment), chosen=True)
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    home = Path(nvcc).parent.parent if nvcc else root / "cuda"
    if nvcc is None and not home.exists():
        return None
    return Toolkit(home=str(home), release=_nvcc_release(home, environment), chosen=False)


def other_toolkit(
    environment: Mapping[str, str], torch_version: str, *, root: Path = _TOOLKITS
) -> Toolkit | None:
    """An installed toolkit of torch's own CUDA release, else one of its major version."""
    wanted = release(torch_version)
    found = []
    for home in sorted(root.glob("cuda-*")):
        number = _nvcc_release(home, environment)
        if number is not None and wanted is not None and number[0] == wanted[0]:
            found.append(Toolkit(home=str(home), release=number, chosen=False))
    return max(found, key=lambda kit: (kit.release == wanted, kit.release or (0, 0)), default=None)


def fits_torch(kit: Toolkit | None, torch_version: str) -> bool:
    wanted = release(torch_version)
    return kit is not None and kit.release is not None and wanted is not None and kit.release[0] == wanted[0]


def compiler(environment: Mapping[str, str]) -> tuple[str, str | None]:
    """The C++ compiler's command and the first line of what it says of its version; None: it does not run."""
    command = environment.get("CXX") or "c++"
    text = _output([command, "--version"], environment)
    return command, text.splitlines()[0] if text else None


def gcc_major(environment: Mapping[str, str], command: str) -> int | None:
    """Its major version; None for another compiler."""
    text = _output([command, "--version"], environment) or ""
    if "clang" in text.lower():
        return None
    number = _output([command, "-dumpversion"], environment) or ""
    match = re.match(r"\d+", number.strip())
    return int(match.group()) if match else None


def gcc_below(cuda: tuple[int, int] | None) -> int | None:
    """The first major version of gcc that this nvcc refuses; None where that is not known."""
    if cuda is None or cuda > _NEWEST_KNOWN:
        return None
    known = [bound for since, bound in sorted(_GCC_BELOW.items()) if since <= cuda]
    return known[-1] if known else None


def refused_gcc(
    environment: Mapping[str, str], command: str, *, root: Path = _TOOLKITS
) -> tuple[int, int] | None:
    """Its major version and the first one that nvcc refuses, where this nvcc does not take this compiler."""
    kit = toolkit(environment, root=root)
    bound, major = gcc_below(kit.release if kit else None), gcc_major(environment, command)
    return (major, bound) if bound is not None and major is not None and major >= bound else None


def ninja_folder(environment: Mapping[str, str]) -> str | None:
    """Where ninja lies though PATH does not lead there: beside the interpreter that runs the ranks."""
    if shutil.which("ninja", path=environment.get("PATH")):
        return None
    folder = Path(sys.executable).parent
    return str(folder) if shutil.which("ninja", path=str(folder)) else None


def has_ninja(environment: Mapping[str, str]) -> bool:
    return bool(shutil.which("ninja", path=environment.get("PATH")) or ninja_folder(environment))


def python_header() -> Path:
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


def triton_cache(environment: Mapping[str, str]) -> Path:
    chosen = environment.get(TRITON_CACHE)
    home = Path(environment.get("TRITON_HOME") or environment.get("HOME") or Path.home())
    return Path(chosen) if chosen else home / ".triton" / "cache"


def mended(
    environment: Mapping[str, str], torch_version: str | None, *, root: Path = _TOOLKITS
) -> dict[str, str]:
    """The environment with what can be put right without asking. What the user has chosen stays.

    Without a `torch_version` for CUDA nothing is compiled by nvcc or Triton.
    """
    changed = dict(environment)
    folder = ninja_folder(environment)
    if folder is not None:
        changed["PATH"] = _joined(environment.get("PATH"), folder)
    for variable, place in libaio_folders(environment).items():
        changed[variable] = _joined(environment.get(variable), place)
    if torch_version is not None:
        _choose_toolkit(changed, torch_version, root)
        _choose_compiler(changed, root)
        if TRITON_CACHE not in environment and why_not_writable(triton_cache(environment)):
            changed[TRITON_CACHE] = str(extensions_dir(environment) / "triton")
    return changed


def build_problem(
    ops: Sequence[Op], environment: Mapping[str, str], torch_version: str | None, *, root: Path = _TOOLKITS
) -> UsageError | None:
    """The first thing without which an op cannot be built or loaded, in a mended environment."""
    ops = [op for op in ops if not _prebuilt(op)]
    if not ops:
        return None
    if not has_ninja(environment):
        return _missing(
            ops[0], "ninja is not on PATH", "torch loads every op through it", "pip install ninja"
        )
    for op in ops:
        if op.with_nvcc and torch_version is not None:
            problem = _nvcc_problem(op, environment, torch_version, root)
            if problem is not None:
                return problem
    folder = extensions_dir(environment)
    unbuilt = [op for op in ops if not op_library(folder, op.name).is_file()]
    return _compile_problem(unbuilt, environment, folder, torch_version, root) if unbuilt else None


def compiler_problem(because: str, environment: Mapping[str, str]) -> UsageError | None:
    """Triton compiles a small C module for each kernel's launcher."""
    command = environment.get("CC")
    candidates = [command] if command else ["cc", "gcc", "clang"]
    if any(shutil.which(name, path=environment.get("PATH")) for name in candidates):
        return None
    return UsageError(
        f"there is no C compiler, and {because}",
        why=f"{' or '.join(candidates)} is not on PATH; Triton compiles with it as a run goes on",
        fix="install gcc (Debian: apt install gcc), or set CC",
    )


def release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _choose_toolkit(environment: dict[str, str], torch_version: str, root: Path) -> None:
    kit = toolkit(environment, root=root)
    if (kit is not None and kit.chosen) or fits_torch(kit, torch_version):
        return
    other = other_toolkit(environment, torch_version, root=root)
    if other is not None:
        environment["CUDA_HOME"] = other.home


def _choose_compiler(environment: dict[str, str], root: Path) -> None:
    """A gcc that nvcc takes, where the usual one is too new for it."""
    if "CXX" in environment or "CC" in environment:
        return
    refused = refused_gcc(environment, "c++", root=root)
    if refused is None:
        return
    _, bound = refused
    path = environment.get("PATH")
    for number in range(bound - 1, _OLDEST_GCC - 1, -1):
        if shutil.which(f"g++-{number}", path=path) and shutil.which(f"gcc-{number}", path=path):
            environment["CC"], environment["CXX"] = f"gcc-{number}", f"g++-{number}"
            return


def _nvcc_problem(
    op: Op, environment: Mapping[str, str], torch_version: str, root: Path
) -> UsageError | None:
    kit = toolkit(environment, root=root)
    wanted = f"CUDA {torch_version} toolkit"
    if kit is None or kit.release is None:
        where = f"{kit.home}/bin/nvcc does not run" if kit else "CUDA_HOME is not set and nvcc is not on PATH"
        return _missing(op, f"there is no nvcc: {where}", "", f"install the {wanted} and set CUDA_HOME")
    if not fits_torch(kit, torch_version):
        number = ".".join(map(str, kit.release))
        why = f"torch is built for CUDA {torch_version}: what another major version compiles does not fit it"
        return _missing(op, f"nvcc in {kit.home} is CUDA {number}", why, f"point CUDA_HOME to a {wanted}")
    return None


def _compile_problem(
    ops: Sequence[Op],
    environment: Mapping[str, str],
    folder: Path,
    torch_version: str | None,
    root: Path,
) -> UsageError | None:
    op = ops[0]
    reason = why_not_writable(folder)
    if reason:
        return _missing(
            op,
            f"the folder for compiled ops cannot be written: {folder}",
            reason,
            "make room or set TORCH_EXTENSIONS_DIR to a folder that is yours",
        )
    command, version = compiler(environment)
    if version is None:
        return _missing(op, f"the C++ compiler {command} does not run", "", "install g++, or set CXX")
    if not python_header().exists():
        return _missing(
            op, f"{python_header()} is not there", "", "install Python's headers (Debian: python3-dev)"
        )
    cuda_op = next((each for each in ops if each.with_nvcc), None)
    if torch_version is None or cuda_op is None:
        return None
    refused = refused_gcc(environment, command, root=root)
    if refused is not None:
        major, bound = refused
        return _missing(
            cuda_op,
            f"{command} is gcc {major}, and nvcc takes gcc below {bound}",
            "",
            f"install g++-{bound - 1} and set CC=gcc-{bound - 1} CXX=g++-{bound - 1}",
        )
    return None


def _missing(op: Op, what: str, why: str, fix: str) -> UsageError:
    instead = f"; or {op.instead}" if op.instead else ""
    return UsageError(
        what, why=f"DeepSpeed's {op.words} needs it" + (f": {why}" if why else ""), fix=fix + instead
    )


def _prebuilt(op: Op) -> bool:
    """DeepSpeed was installed with this op built."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        return False
    return any((Path(found.origin).parent / "ops").glob(f"{op.prebuilt}*.so"))


def _nvcc_release(home: Path, environment: Mapping[str, str]) -> tuple[int, int] | None:
    nvcc = home / "bin" / "nvcc"
    try:
        file = nvcc.stat()
    except OSError:
        return None
    return _release_told(str(nvcc), (file.st_mtime_ns, file.st_size), tuple(sorted(environment.items())))


@lru_cache(maxsize=16)
def _release_told(
    nvcc: str, _file: tuple[int, int], environment: tuple[tuple[str, str], ...]
) -> tuple[int, int] | None:
    """What one file says in one environment is asked once: a launch needs it many times."""
    text = _output([nvcc, "--version"], dict(environment))
    match = re.search(r"release (\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


def _joined(folders: str | None, more: str) -> str:
    return os.pathsep.join(filter(None, [folders, more]))


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """A tool's standard output; None when it is not there or fails."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=True,
            env=dict(environment),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
