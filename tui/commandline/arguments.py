"""An argument parser whose mistakes are `UsageError`s that name the nearest option."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from llmtop.presets.errors import UsageError, nearest

RUN_HELP = "a run's id, a unique beginning or end of it, or latest"
RUN_ANYWHERE_HELP = f"{RUN_HELP}; [USER@]HOST:RUN for one on another machine"
MOST = 10**9
"""Above this a count is a slip of the hand."""
MOST_TIME = 10**6
"""The same of seconds and minutes that somebody would wait."""
COMMAND = "command"
"""What follows `--`, as a tuple of words: for a parser that has a default of this name."""
_LAUNCHERS = frozenset({"python", "python3", "torchrun", "deepspeed", "accelerate", "bash", "sh"})

_UNSHOWN = partial(argparse.RawDescriptionHelpFormatter, width=80)
"""What argparse tries each argument with when it is added. It would ask how wide the terminal is, by a module
that loads three libraries of compression."""


def whole(text: str) -> int:
    """A whole number; raises ArgumentTypeError that says how 32k is written."""
    try:
        return int(text)
    except ValueError:
        pass
    from llmtop.presets.option_values import spelt_out  # for mistakes alone

    fix = spelt_out(text)
    raise argparse.ArgumentTypeError(f"'{text[:80]}' is no whole number" + (f": {fix}" if fix else ""))


def count(text: str) -> int:
    """The same from 1 on, within reason."""
    found = whole(text)
    if not 0 < found <= MOST:
        raise argparse.ArgumentTypeError(f"'{text[:80]}' is no whole number from 1 to {MOST:,}")
    return found


def positive(text: str) -> float:
    """A number above 0, of seconds or minutes."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < MOST_TIME:
        raise argparse.ArgumentTypeError(f"'{text[:80]}' is no number above 0 and below {MOST_TIME:,}")
    return found


def number(text: str) -> float:
    """Any number; one without end is one too, for a wait."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise argparse.ArgumentTypeError(f"'{text[:80]}' is no number")
    return found


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: its help ends with an example, options are never abbreviated."""

    def __init__(self, name: str, usage: str, text: str, example: str) -> None:
        super().__init__(
            prog=f"llmtop {name}",
            usage=f"llmtop {name} {usage}".rstrip(),
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=_UNSHOWN,
            allow_abbrev=False,
        )
        self._command = name
        self._words: list[str] = []
        # argparse would name the function: invalid int value.
        self.register("type", int, whole)
        self.register("type", float, number)

    def format_help(self) -> str:
        """As wide as the terminal."""
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; raises UsageError for one that is not known."""
        own, rest = list(words), None
        if "--" in own:
            at = own.index("--")
            own, rest = own[:at], tuple(own[at + 1 :])
            if self.get_default(COMMAND) is None:
                raise UsageError(
                    f"{self._command}: nothing may follow '--'",
                    fix="llmtop run -- COMMAND launches a training command of your own",
                )
        self._words = own
        args, unknown = self.parse_known_intermixed_args(own)
        if rest is not None:
            setattr(args, COMMAND, rest)
        elif unknown and self.get_default(COMMAND) is not None:
            self._refuse_own_command(own)
        for word in unknown:
            if word.startswith("-"):
                raise self._unknown_option(word.split("=", 1)[0])
        if unknown:
            self.error(f"unexpected argument '{unknown[0]}'")
        return args

    def error(self, message: str) -> NoReturn:
        """Called by argparse for whatever it refuses."""
        if "are required" in message:
            # What is missing may be there, with a slip of the hand.
            for word in self._words:
                name = word.split("=", 1)[0]
                if name.startswith("--") and name not in self._option_string_actions:
                    raise self._unknown_option(name)
        raise UsageError(f"{self._command}: {message}", fix=f"usage: {self.usage}")

    def _refuse_own_command(self, words: Sequence[str]) -> None:
        """Raise UsageError where a script or its launcher stands among the words."""
        import shlex  # for mistakes alone

        for at, word in enumerate(words):
            if word.endswith(".py") or word in _LAUNCHERS:
                whole_command = shlex.join([*(() if word in _LAUNCHERS else ("python",)), *words[at:]])
                raise UsageError(
                    f"{self._command}: a command of your own stands behind '--'",
                    fix=shlex.join(["llmtop", self._command, *words[:at], "--"]) + f" {whole_command}",
                )

    def _unknown_option(self, word: str) -> UsageError:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        guess = _with_value(word, known) or nearest(word, known)
        return UsageError(
            f"{self._command}: unknown option '{word}'",
            fix=f"did you mean '{guess}'?" if guess else f"llmtop {self._command} --help lists the options",
        )


_WITH_VALUES = {
    **{name: f"--precision {name}" for name in ("bf16", "fp16", "fp32")},
    "load-in-4bit": "--quantization nf4",
    "load-in-8bit": "--quantization int8",
    "qlora": "--quantization nf4 --lora-rank 16",
    "lora": "--lora-rank 16",
    **dict.fromkeys(("flash-attn", "flash-attention", "flash-attention-2"), "--attention flash_attention_2"),
    "cpu": "--gpu cpu",
}
"""Switches of other programs, as an option here with its value."""
_STAGE = r"(?:deepspeed-)?(?:ds-)?zero(?:-?stage)?-?([0-3])"


def _with_value(word: str, known: Sequence[str]) -> str:
    """`--zero 3` for `--zero3`; empty for what is no switch elsewhere, or none of this command."""
    name = word.lower().replace("_", "-").lstrip("-")
    stage = re.fullmatch(_STAGE, name)
    meant = f"--zero {stage[1]}" if stage else _WITH_VALUES.get(name, "")
    return meant if meant.split(" ", 1)[0] in known else ""
