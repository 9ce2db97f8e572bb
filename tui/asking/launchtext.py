"""A launch in words, before it is made: the command that does the same, and DeepSpeed's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from shlex import quote
from typing import Any

from llmtop.presets.spec import RunSpec
from llmtop.tui.commandline.options import option_text, setting_texts
from llmtop.tui.plans.planning import RAW, Draft

_INDENT = 2


def launch_command(draft: Draft, spec: RunSpec, visible_devices: str = "") -> str:
    """What is typed in a shell for the same run; `visible_devices` as in CUDA_VISIBLE_DEVICES."""
    words = [f"CUDA_VISIBLE_DEVICES={quote(visible_devices)}"] if visible_devices else []
    words += ["llmtop run"]
    words += [quote(draft.recipe)] if draft.recipe is not None else []
    kept = draft.kept_model
    words += [f"--model {quote(kept)}"] if kept is not None else []
    for key in draft.edits:
        words += _edit_texts(key, draft.edits[key], spec)
    return " ".join(words)


def _edit_texts(key: str, edited: Any, spec: RunSpec) -> Iterator[str]:
    if key == RAW:
        yield from (f"--set {quote(f'{RAW}.{word}')}" for word in str(edited).split())
    elif "." in key:
        yield from setting_texts(key, edited)
    else:
        value = getattr(spec.options, key)
        yield f"--set {key}=none" if value is None else option_text(key, value)


def config_text(config: dict[str, Any]) -> str:
    """As it lies in the run's folder."""
    return json.dumps(config, indent=_INDENT, ensure_ascii=False)
