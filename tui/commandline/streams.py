"""Standard output and error of the command line: nothing that a file says reaches a terminal as a command.

Names and texts come from files of any origin. The app has `paint.harmless`; the command line writes
through `SafeStream`, so that no command has to remember it. A stream that cannot be written to ends
in a `LlmtopError`. Only the standard library is loaded, because `llmtop --help` comes this way too.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import TracebackType
from typing import Any, TextIO, cast

CONTROLS = (*range(0x00, 0x20), *range(0x7F, 0xA0))
BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)
"""Characters that turn the direction of the text after them."""

_BLANKS = dict.fromkeys((*CONTROLS, *BIDI), " ")

# In JSON's own spelling: an answer of --json stays the same JSON.
_HALVES = range(0xD800, 0xE000)
"""Of pairs: a name of a file that is no text has such in Python."""
_MOST_KEPT = 0xFFFF
"""What lies above is rare, and there is a lot of it."""


class _Escapes(dict[int, int | str]):
    """What each character is written as, made when it is met: one that cannot be written spelt out."""

    def __missing__(self, code: int) -> int | str:
        harmful = code in CONTROLS or code in BIDI or code in _HALVES
        found = f"\\u{code:04x}" if harmful and code != ord("\n") else code
        if code <= _MOST_KEPT:
            self[code] = found
        return found


_ESCAPES = _Escapes()


def blanked(text: str) -> str:
    """With a blank in place of each character that a terminal would act on; as wide as it was."""
    return text if text.isprintable() else text.translate(_BLANKS)


def escaped(text: str) -> str:
    """The text with control characters other than newline spelt out, and what no encoding can write."""
    return text.translate(_ESCAPES)


class SafeStream:
    """A text stream whose control characters are spelt out; all but writing is the stream's own."""

    def __init__(self, plain: TextIO, name: str) -> None:
        self.plain = plain
        self._name = name

    def write(self, text: str) -> int:
        return self.write_as_it_is(escaped(text))

    def write_as_it_is(self, text: str) -> int:
        """For data on its way to a file or a pipe."""
        try:
            self.plain.write(text)
        except OSError as error:
            self._refuse(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.plain.flush()
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        from llmtop.presets.errors import UsageError

        drop(self.plain)
        raise UsageError(
            f"standard {self._name} cannot be written",
            why=error.strerror or str(error),
            fix="send it to a place that has room",
        ) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def drop(stream: TextIO) -> None:
    """Let what is still buffered, and the interpreter's own flush at exit, find a place to go to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_data(text: str) -> None:
    """Write to standard output what somebody reads who is no terminal, unchanged; else made safe."""
    if isinstance(sys.stdout, SafeStream) and not sys.stdout.isatty():
        sys.stdout.write_as_it_is(text)
    else:
        sys.stdout.write(text.expandtabs())


@contextmanager
def safe_streams() -> Iterator[None]:
    """Write through `SafeStream`s; what goes to a closed one is lost."""
    output, error = (
        cast(TextIO, SafeStream(io.StringIO() if stream is None else stream, name))
        for stream, name in ((sys.stdout, "output"), (sys.stderr, "error"))
    )
    with redirect_stdout(output), redirect_stderr(error):
        yield


@contextmanager
def plain_streams() -> Iterator[None]:
    """The streams as they were, for what draws on the terminal itself."""
    with redirect_stdout(_plain(sys.stdout)), redirect_stderr(_plain(sys.stderr)):
        yield


def _plain(stream: TextIO) -> TextIO:
    return stream.plain if isinstance(stream, SafeStream) else stream


def tell_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As the interpreter tells of what nobody caught, but safe: a message may quote a file."""
    import traceback  # for bugs alone

    if sys.stderr is not None:
        sys.stderr.write(escaped("".join(traceback.format_exception(kind, error, trace))))


def is_text(word: str) -> bool:
    """Whether it can be written in UTF-8: an argument or a variable of other bytes cannot."""
    return word.isascii() or not any(ord(character) in _HALVES for character in word)


def can_draw() -> bool:
    """Whether there is a terminal for the app: one that can place its cursor."""
    return on_terminal() and os.environ.get("TERM") != "dumb"


def on_terminal() -> bool:
    """Whether somebody sits at both ends; a closed stream is none."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
