"""Targets that are logs: single lines of events of every kind, and what ranks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fuzzing.making import TEXTS, Maker, Pairs, dumped
from benchmarks.fuzzing.target import Target
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.oom.message import read_shortage, short_message
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.trainer.supervisor.postmortem import last_line
from llmtop.tui.commandline import streams
from llmtop.tui.widgets.paint import harmless
from tests.recorded import BEGAN

EVENTS = msgspec.inspect.type_info(AnyEvent)


def event(maker: Maker) -> bytes:
    """Of any kind, with values as far out as its fields allow."""
    assert isinstance(EVENTS, msgspec.inspect.UnionType)
    value = maker.of(maker.draw.choice(EVENTS.types))
    stamps = {"v": 1, "t": BEGAN + maker.draw.uniform(-10, 100), "m": maker.draw.uniform(0, 2000)}
    far = {"t": (1e300, -1e300, 0, -1, 253402300800.0), "m": (1e300, -1.0), "v": (0, 2, -1)}
    for key in stamps:
        if maker.chance(0.04):
            stamps[key] = maker.draw.choice(far[key])
    kept = [(key, item) for key, item in value if key not in stamps]
    return dumped(Pairs([*stamps.items(), *kept])).encode("utf-8", "surrogatepass")


def sound(line: bytes) -> Any:
    """What a line says; of one that was spoilt before, something else."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"kind": "step_finished"}


def _make_lines(maker: Maker, folder: Path) -> None:
    lines = [event(maker) for _ in range(maker.draw.choice((1, 2, 4, 12)))]
    if maker.chance(0.3):
        at = maker.draw.randrange(len(lines))
        lines[at] = maker.bytes_of(maker.json_of(maker.spoilt(sound(lines[at]))))
    (folder / "rank-0.jsonl").write_bytes(b"\n".join(lines) + maker.draw.choice((b"\n", b"", b"\n\n\0")))


def _act_lines(folder: Path) -> None:
    tail = EventTail(folder / "rank-0.jsonl")
    state = fold(RunState(run_id="case"), sorted(tail.poll(), key=lambda found: found.t))
    assert state.status and tail.skipped_lines >= 0


_FRAGMENTS = (
    *(
        "wandb",
        "wandb ",
        "hf_",
        "sk-",
        "eyJ",
        "-----BEGIN PRIVATE KEY-----",
        "token ",
        "bearer 1",
        "a=",
        "key=",
    ),
    *(
        "--key ",
        "Tried to allocate ",
        "GPU 0 ",
        "9" * 40,
        "1.",
        " GiB",
        "GiB free",
        "Process 1 has ",
        "://",
        "@",
    ),
    *(
        "total capacity of ",
        "\x1b[",
        "\x1b]",
        "\x1b",
        "\r",
        "\n",
        "\t",
        "user:",
        "?sig=",
        "key -> ",
        ".",
        '"',
    ),
    *("\\", "0123456789abcdef", " ", "Error: ", "a", "password", "_", "-", "A1b2", "=", ","),
)


def _make_log(maker: Maker, folder: Path) -> None:
    parts = [
        maker.draw.choice((*_FRAGMENTS, *TEXTS)) * maker.draw.choice((1, 1, 1, 3, 60, 2000))
        for _ in range(maker.draw.randrange(1, 12))
    ]
    text = "".join(parts)[:20_000].encode("utf-8", "surrogatepass")
    (folder / "rank-0.log").write_bytes(maker.bytes_of(text) if maker.chance(0.1) else text)


def _act_log(folder: Path) -> None:
    log = folder / "rank-0.log"
    text = log.read_bytes().decode("utf-8", "replace")
    clean = Scrubber({"A_TOKEN": "not like any token"}).text(text)
    assert "-----BEGIN PRIVATE KEY-----" not in clean
    for line in text.split("\n"):
        shown = harmless(line)
        assert not any(ord(character) in streams.CONTROLS for character in shown)
    assert "\x1b" not in streams.escaped(text)
    read_shortage(text)
    short_message(text)
    last_line(log)


TARGETS: tuple[Target, ...] = (
    Target(name="lines of events", make=_make_lines, act=_act_lines, share=0.6),
    Target(name="output of ranks", make=_make_log, act=_act_log, share=0.1),
)
