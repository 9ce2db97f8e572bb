"""Where the state of a run lies while its ranks are started anew: in memory if it has room, else on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from llmtop.presets.spec import DTYPE_BYTES, RunSpec
from llmtop.profiler.hardware.disk import free_bytes
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.deviceevents import HostSample
from llmtop.profiler.record.rundir import RunDir

SHARED_MEMORY = Path("/dev/shm")
_SPARE = 1.25
"""Room beyond the state itself, for what the ranks take meanwhile."""
_MASTER_AND_MOMENTS_BYTES = 12
"""Of a trained weight: the master weight and both moments in fp32, 3 x 4."""
_EIGHT_BIT_BYTES = 6
"""The master weight in fp32 and both moments in 8 bits, 4 + 2 x 1; the spare holds their scales, 8 in 256."""


def state_bytes(spec: RunSpec, prediction: Prediction) -> int:
    """What a saved state takes: master weights and moments of what is trained, and frozen weights once."""
    per_trained = _EIGHT_BIT_BYTES if "8bit" in spec.options.optimizer else _MASTER_AND_MOMENTS_BYTES
    frozen = prediction.params - prediction.trainable_params
    # With adapters the frozen weights stay out: they come from where they came from at the launch.
    kept = 0 if spec.options.lora_rank else frozen * DTYPE_BYTES[spec.options.precision]
    return prediction.trainable_params * per_trained + kept


def memory_folder(run: RunDir, root: Path = SHARED_MEMORY) -> Path:
    """This run's folder in shared memory; a later supervisor finds it by the same name."""
    mark = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:12]
    return root / f"llmtop-{os.getuid()}-{mark}"


def disk_folder(run: RunDir) -> Path:
    return run.path / "restage"


def restage_folders(run: RunDir) -> tuple[Path, ...]:
    """Where a state may lie: those of the folders that are there, and this user's."""
    return tuple(folder for folder in (memory_folder(run), disk_folder(run)) if _is_ours(folder))


def make_folder(run: RunDir, needed_bytes: int, host: HostSample | None, root: Path = SHARED_MEMORY) -> Path:
    """An empty folder that has room, as far as is known."""
    folder = disk_folder(run)
    if _memory_has_room(needed_bytes, host, root):
        folder = memory_folder(run, root)
    # A folder that another user has put there is not used: making it fails, or its mode does not hold.
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
    except OSError:
        folder = disk_folder(run)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def keep_states(run: RunDir) -> list[Path]:
    """Move what is left in the folders to the run's checkpoints; the new places."""
    kept = []
    for folder in restage_folders(run):
        for state in sorted(folder.glob("step-*")):
            target = run.checkpoints_dir / state.name
            if not target.exists():
                # Under its name only when all of it is there.
                aside = run.checkpoints_dir / f".{state.name}.moving"
                shutil.rmtree(aside, ignore_errors=True)
                shutil.copytree(state, aside)
                aside.rename(target)
                kept.append(target)
        shutil.rmtree(folder)
    return kept


def remove_states(run: RunDir) -> None:
    for folder in restage_folders(run):
        shutil.rmtree(folder)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def _memory_has_room(needed_bytes: int, host: HostSample | None, root: Path) -> bool:
    needed = int(_SPARE * needed_bytes)
    free = free_bytes(root) if root.is_dir() else None
    if free is None or free < needed or host is None or host.memory_available_bytes is None:
        return False
    if host.memory_available_bytes < needed:
        return False
    limit, used = host.cgroup_limit_bytes, host.cgroup_used_bytes
    return limit is None or used is None or limit - used >= needed
