"""Checks a DeepSpeed configuration against the key tables: unknown keys, wrong types, values out of range.

The result holds only what DeepSpeed reads, with values in the types that it wants: `5e8` as an
integer, numbers and truth values in quotes as what they say, stage-3 keys in their usual spelling.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import nearest, written
from llmtop.trainer.dsimport.hints import hint, is_remark
from llmtop.trainer.dsimport.keys import BLOCKS, DEEPSPEED_SERIES, MEANINGFUL_AUTO, REMOVED, Block
from llmtop.trainer.dsimport.problem import Findings, Problem
from llmtop.trainer.dsimport.value import BadValue, read_value

AUTO = "auto"


class Checked(Struct, frozen=True, kw_only=True):
    config: dict[str, Any]
    """What DeepSpeed reads, without the keys of `autos`."""
    autos: tuple[str, ...]
    """Dotted paths of the keys whose value is the word "auto"."""


def check(config: dict[str, Any], findings: Findings, *, refuse_unread: bool = False) -> Checked:
    """Validate a whole configuration, adding what is found to `findings`.

    Keys that DeepSpeed would skip in silence are warned about, or refused where `refuse_unread` asks.
    """
    autos: list[str] = []
    _refuse_removed(config, findings)
    clean = _check_block("", {k: v for k, v in config.items() if k not in REMOVED}, autos, findings)
    if refuse_unread:
        findings.problems = [replace(p, fatal=True) if p.unread else p for p in findings.problems]
    return Checked(config=clean, autos=tuple(autos))


def _refuse_removed(config: dict[str, Any], findings: Findings) -> None:
    for path, fix in REMOVED.items():
        block, _, key = path.rpartition(".")
        holder = config.get(block) if block else config
        if isinstance(holder, dict) and key in holder:
            findings.refuse(path, "was removed from DeepSpeed, which refuses any file that still has it", fix)


def _check_block(path: str, given: dict[str, Any], autos: list[str], findings: Findings) -> dict[str, Any]:
    block = BLOCKS[path]
    clean: dict[str, Any] = {}
    for spelled, value in given.items():
        full = f"{path}.{spelled}" if path else spelled
        name = _name(block, spelled)
        if full in REMOVED:
            continue
        if name is None and block.is_open:
            clean[spelled] = value
        elif name is None:
            _report_unknown(path, spelled, value, findings)
        elif value == AUTO and full not in MEANINGFUL_AUTO:
            autos.append(_usual(path, name))
        elif _usual_spelling(block, name) in clean:
            other = name if spelled != name else f"stage3_{name}"
            findings.refuse(
                full, f"is given together with {other}, its other spelling", "keep one of the two"
            )
        else:
            _keep(clean, path, name, spelled, value, autos, findings)
    return clean


def _keep(
    clean: dict[str, Any],
    path: str,
    name: str,
    spelled: str,
    value: Any,
    autos: list[str],
    findings: Findings,
) -> None:
    """Check one known key and put it into `clean` in its usual spelling."""
    block = BLOCKS[path]
    full = f"{path}.{spelled}" if path else spelled
    usual = _usual_spelling(block, name)
    key = block.keys[name]
    if value is None and key.nullable or full in MEANINGFUL_AUTO and value == AUTO:
        clean[usual] = value
    elif key.kind == "block":
        if isinstance(value, dict):
            # bfloat16 is the old name of bf16; a block without a table is kept as it is.
            table = "bf16" if full == "bfloat16" else full
            clean[usual] = _check_block(table, value, autos, findings) if table in BLOCKS else value
        else:
            findings.refuse(
                full, f"is {written(value)}, and DeepSpeed wants an object in braces", _block_fix(full, value)
            )
    else:
        try:
            read = read_value(key, value)
        except BadValue as error:
            findings.refuse(full, f"{written(value)} {error.why}", error.fix or f"give {key.expected}")
            return
        clean[usual] = read.value
        if read.note:
            findings.warn(full, f"{written(value)} {read.note}", f"write {_as_json(read.value)}")


def _name(block: Block, spelled: str) -> str | None:
    """The table's name of a key, or None for a key that the block does not have."""
    if spelled in block.keys:
        return spelled
    bare = spelled.removeprefix("stage3_")
    return bare if bare != spelled and bare in block.prefixed else None


def _usual_spelling(block: Block, name: str) -> str:
    return f"stage3_{name}" if name in block.prefixed else name


def _usual(path: str, name: str) -> str:
    usual = _usual_spelling(BLOCKS[path], name)
    return f"{path}.{usual}" if path else usual


def _report_unknown(path: str, spelled: str, value: Any, findings: Findings) -> None:
    full = f"{path}.{spelled}" if path else spelled or '""'
    fix = hint(path, spelled)
    if not BLOCKS[path].strict:
        if is_remark(spelled):
            return
        where = path or "DeepSpeed at top level"
        what = f"is no key of {where}: it is never read, and nothing is said"
        if path == "" and spelled in ("offload_optimizer", "offload_param"):
            what += "; nothing is offloaded"
        findings.problems.append(Problem(key=full, what=what, fix=fix, unread=True))
    elif value == AUTO:
        findings.warn(
            full, f'is no key of {path}; DeepSpeed lets it pass only because its value is "auto"', fix
        )
    else:
        findings.refuse(
            full, f"is no key of {path}, and DeepSpeed {DEEPSPEED_SERIES} refuses unknown keys there", fix
        )


def _block_fix(full: str, value: Any) -> str:
    name = full.rpartition(".")[2]
    if name in ("offload_optimizer", "offload_param"):
        device = value if value in ("cpu", "nvme", "none") else "cpu" if value else "none"
        return f'write "{name}": {{"device": "{device}"}}'
    if name in ("fp16", "bf16", "bfloat16", "torch_autocast"):
        return f'write "{name}": {{"enabled": {str(bool(value)).lower()}}}'
    if name == "zero_optimization":
        stage = value if value in (0, 1, 2, 3) else 2
        return f'write "zero_optimization": {{"stage": {stage}}}'
    if name in ("optimizer", "scheduler"):
        guess = nearest(str(value), ("AdamW", "Adam", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
        return f'write "{name}": {{"type": "{guess or "..."}", "params": {{...}}}}'
    return f'write "{name}": {{...}}, or delete it'


def _as_json(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"
