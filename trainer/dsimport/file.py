"""Reads a DeepSpeed configuration file as people have them: any encoding, JSON or Hjson."""

from __future__ import annotations

import codecs
import math
import re
from pathlib import Path
from typing import Any

from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.foreign import read_bytes, why_unreadable
from llmtop.trainer.dsimport.keys import BLOCKS
from llmtop.trainer.dsimport.parse import ParseError, parse
from llmtop.trainer.dsimport.problem import Findings

_LARGEST_FILE_BYTES = 4 << 20
_DEEPEST = 100
"""Far beyond any configuration, far below the interpreter's recursion limit."""
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_config(path: Path, findings: Findings) -> dict[str, Any]:
    """The object in the file. Raises UsageError for anything that is not one."""
    text = _text(path, findings)
    _refuse_yaml(path, text)
    config = _parse(path, text, findings)
    if not isinstance(config, dict):
        raise UsageError(
            f"{path} holds a {_json_name(config)}, not an object",
            why="a DeepSpeed configuration is an object of keys and values in braces",
            fix="give the file with the braces around its keys",
        )
    if not config:
        raise UsageError(
            f"{path} is empty" if not text.strip() else f"{path} holds no key",
            why="nothing in it says how to train",
            fix=_choices(path.parent),
        )
    _refuse_model_config(path, config)
    _refuse_other_text(path, text, config)
    sound: dict[str, Any] = _sound(path, config)
    return sound


def _refuse_model_config(path: Path, config: dict[str, Any]) -> None:
    """A model's config.json has none of the keys, and would be warned of key by key."""
    if "model_type" in config or "architectures" in config:
        raise UsageError(
            f"{path} is a model's configuration, not one of DeepSpeed",
            why="it names a model_type or architectures, as Hugging Face's config.json does",
            fix=f"llmtop plan --model {path}",
        )


def _refuse_other_text(path: Path, text: str, config: dict[str, Any]) -> None:
    """Hjson takes any lines with a colon for an object without its braces: a list of users, a log."""
    known = BLOCKS[""].keys
    if not text.lstrip().startswith("{") and not any(key.split(".")[0] in known for key in config):
        raise UsageError(
            f"{path} is no DeepSpeed configuration",
            why="it has no braces, and none of its lines begins with a key of DeepSpeed",
            fix=_choices(path.parent),
        )


def _text(path: Path, findings: Findings) -> str:
    content = _content(path)
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            findings.warn(
                "file",
                f"begins with a byte order mark ({encoding.removesuffix('-sig')}); transformers and DeepSpeed"
                " read plain UTF-8 only",
                "save it as UTF-8 without a mark",
            )
            return _decoded(path, content, encoding)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        findings.warn(
            "file",
            f"byte 0x{content[error.start]:02x} in line {line} is not UTF-8, all that DeepSpeed reads",
            "save it as UTF-8",
        )
        return content.decode("latin-1")


def _content(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder", why="a DeepSpeed configuration is one file", fix=_choices(path)
            )
        return read_bytes(path, _LARGEST_FILE_BYTES)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", fix=_choices(path.parent, path.name)) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read", why=why_unreadable(error), fix="give a readable DeepSpeed JSON file"
        ) from None


def _choices(folder: Path, wanted: str = "") -> str:
    """Advice that names the configuration files of a folder."""
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in (".json", ".jsonc", ".hjson"))
    except (OSError, ValueError):
        names = []
    guess = nearest(wanted, names) if wanted else None
    if guess:
        return f"did you mean {folder / guess}?"
    return f"give one of its files: {', '.join(names[:8])}" if names else "give a DeepSpeed JSON file"


def _decoded(path: Path, content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text", why=str(error), fix="save it as UTF-8") from None


def _refuse_yaml(path: Path, text: str) -> None:
    """Accelerate's own files are YAML; read as Hjson they would come out wrong in silence."""
    if text.lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        return
    if path.suffix in (".yaml", ".yml") or re.search(r"^---|^\s*[\w.]+:[ \t]*$", text, re.MULTILINE):
        raise UsageError(
            f"{path} is YAML",
            why="accelerate keeps its own settings in YAML; DeepSpeed reads JSON",
            fix="give the file that its deepspeed_config_file names, or its deepspeed_config part as JSON",
        )


def _parse(path: Path, text: str, findings: Findings) -> Any:
    try:
        parsed = parse(text)
    except ParseError as error:
        raise UsageError(
            f"{path} is not JSON",
            why=str(error),
            fix="correct that line; keys and texts go in double quotes, and each key may stand once",
        ) from None
    if parsed.not_strict:
        findings.warn(
            "file",
            f"is not strict JSON ({parsed.not_strict}): DeepSpeed reads such files, transformers and"
            " accelerate do not",
            "take out comments and trailing commas, and put every text in double quotes",
        )
    return parsed.value


def _sound(path: Path, value: Any, key: str = "", depth: int = 0) -> Any:
    """The value with texts that can be printed; refuses what cannot be written out as JSON again."""
    if depth > _DEEPEST:
        raise UsageError(f"{path}: {key[:60]}... is nested too deeply", fix=f"nest at most {_DEEPEST} blocks")
    if isinstance(value, dict):
        return {
            _printable(name): _sound(path, inner, f"{key}.{name}" if key else name, depth + 1)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_sound(path, inner, key, depth + 1) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{path}: {key} is too large for a number", fix="write a number below 1e308")
    return _printable(value) if isinstance(value, str) else value


def _printable(text: str) -> str:
    """Escaped surrogates come in pairs; a lone one is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_name(value: Any) -> str:
    for kind, name in ((list, "list"), (str, "text"), (bool, "truth value"), (type(None), "null")):
        if isinstance(value, kind):
            return name
    return "number"
