"""What mends a run, as it is typed for a change to one: `zero=3` where `llmtop run` takes `--zero 3`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.option_values import field_types
from llmtop.presets.resolve import parse_set
from llmtop.trainer.change.keys import FIXED

_SET = re.compile(r"--set (?=[a-z_]+[.=])")
_OPTION = re.compile(r"--(no-)?([a-z][a-z0-9-]*)(?:[ =]([\w./+-]*\w))?")


@contextmanager
def as_set_takes_it() -> Iterator[None]:
    """Errors of checks that are a launch's too tell their mend in the words of a change."""
    try:
        yield
    except LlmtopError as error:
        error.fix = set_words(error.fix)
        raise


def set_words(fix: str) -> str:
    """A mend with its options as `key=value`; those that a live run cannot change stay as they are."""
    return _OPTION.sub(_as_word, _SET.sub("", fix))


def _as_word(option: re.Match[str]) -> str:
    no, name, value = option.groups()
    key = name.replace("-", "_")
    kind = field_types().get(key)
    if kind is None or key in FIXED:
        return option.group()
    if kind is bool:
        rest = option.group()[len(f"--{no or ''}{name}") :]
        return f"{key}={'false' if no else 'true'}{rest}"
    if not value:
        return key
    return f"{key}={value}" if _is_value(key, value) else f"{key} {value}"


def _is_value(key: str, value: str) -> bool:
    """Whether the word behind an option is its value, or stands for one as N does; else it goes on with the
    sentence."""
    if value.isupper():
        return True
    try:
        parse_set(f"{key}={value}", key)
    except UsageError:
        return False
    return True
