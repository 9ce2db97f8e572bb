"""Changes that would start the ranks again and leave every one of their settings as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.liger import kernels_on
from llmtop.presets.no_effect import idle_keys
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.changeevents import KeyChange
from llmtop.trainer.dsconfig import deepspeed_config


def refuse_idle_relaunch(old: RunSpec, new: RunSpec, changes: Sequence[KeyChange]) -> None:
    """Raise UsageError where nothing that takes a relaunch would come of it."""
    relaunching = [change for change in changes if change.restage]
    reasons = dict(_idle(old, new, relaunching))
    if not relaunching or len(reasons) < len(relaunching):
        return
    names = ", ".join(reasons)
    raise UsageError(
        f"{names}: the ranks would be started again, and nothing would change",
        why="; ".join(dict.fromkeys(reasons.values())),
        fix="leave it out" if len(reasons) == 1 else "leave them out",
    )


def _idle(old: RunSpec, new: RunSpec, changes: Sequence[KeyChange]) -> Iterator[tuple[str, str]]:
    """Keys without effect, and why."""
    after = new.options
    for change in changes:
        if change.key == "nvme_path" and "nvme" not in (after.offload_optimizer, after.offload_param):
            yield change.key, "nothing is offloaded to NVMe"
        elif change.key == "checkpointing_reentrant" and not after.gradient_checkpointing:
            yield change.key, "nothing is recomputed without gradient_checkpointing"
        elif change.key.startswith("liger") and kernels_on(old) == kernels_on(new):
            yield change.key, "the same kernels run already"
        elif change.key.startswith("deepspeed."):
            why = _idle_key(change.key.removeprefix("deepspeed."), new)
            if why or _same_config(old, new):
                yield change.key, why or "DeepSpeed's configuration is the same"


def _same_config(old: RunSpec, new: RunSpec) -> bool:
    """Whether the new raw keys say what would be so without them."""
    with_old_keys = replace(new, options=replace(new.options, deepspeed=old.options.deepspeed))
    try:
        return deepspeed_config(with_old_keys) == deepspeed_config(new)
    except UsageError:
        return False  # the old keys contradict the new options


def _idle_key(path: str, spec: RunSpec) -> str:
    """Why a raw key does nothing in this program; empty where it may."""
    for idle in idle_keys(spec.options.deepspeed, nodes=spec.options.nodes):
        if path == idle.path or path.startswith(f"{idle.path}."):
            return idle.why
    return ""
