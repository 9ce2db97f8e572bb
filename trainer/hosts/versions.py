"""Whether all hosts of a run have the same libraries: ranks of other versions fail late, or compute apart."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from llmtop.presets.errors import UsageError
from llmtop.presets.version import DISTRIBUTION, llmtop_version, package_versions

_PACKAGES = (
    *("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "peft"),
    *("bitsandbytes", "liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4", "triton", "datasets"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
_MOST_TOLD = 6


def versions_here() -> dict[str, str]:
    """Of this environment, as far as ranks load it."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, DISTRIBUTION: llmtop_version(), **package_versions(_PACKAGES)}


def require_alike(versions: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UsageError where hosts differ, naming package, host and version; the first one is the measure."""
    if not versions:
        return
    first, *others = versions
    told = []
    for package in sorted({package for found in versions.values() for package in found}):
        wanted = versions[first].get(package, "none")
        told += [
            f"{package} {found} on {host}, {wanted} on {first}"
            for host in others
            if (found := versions[host].get(package, "none")) != wanted
        ]
    if told:
        more = f"; and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        raise UsageError(
            "the hosts have not the same versions: " + "; ".join(told[:_MOST_TOLD]) + more,
            why="ranks of different versions fail late, or compute something else",
            fix="install the same environment on every host, or choose hosts: --include, --exclude",
        )
