"""A small share of the fuzzing, the same cases each time; `python -m benchmarks.fuzz` runs millions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz
from benchmarks.fuzzing import fed
from benchmarks.fuzzing.making import Maker, Pairs, Verbatim, dumped
from benchmarks.fuzzing.running import Tally, maker_of, run_part
from benchmarks.fuzzing.table import TARGETS
from benchmarks.fuzzing.target import CASE, Target, Unnamed, cause, outcome_of, place_of, prepared
from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.hf import tracing

CASES = 120
each = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a target sets for its own process is put back."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME", "LLMTOP_RUNS_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tracing, "_PACKAGES", tracing._PACKAGES)


@each
def test_bad_input_is_taken_or_refused_in_words(target: Target, tmp_path: Path) -> None:
    count = max(8, round(CASES * min(1.0, target.share)))
    found = run_part(target, 0, count, tmp_path, lambda number: None)
    assert found["failures"] == []
    assert found["cases"] == found["taken"] + found["refused"] > 5


@each
def test_what_hypothesis_draws_too(target: Target, tmp_path: Path) -> None:
    prepared(target, tmp_path)
    tally = Tally()

    @settings(max_examples=10, suppress_health_check=list(HealthCheck), database=None)
    @given(st.randoms(use_true_random=False))
    def drawn(draw: random.Random) -> None:
        tally.count(target, Maker(draw), tmp_path, 0)

    drawn()
    assert tally.failures == []


def test_a_case_is_known_by_its_number(tmp_path: Path) -> None:
    target = TARGETS[0]
    prepared(target, tmp_path)
    contents = []
    for _ in range(2):
        outcome_of(target, maker_of(target, 7), tmp_path)
        contents.append((tmp_path / "case" / "recipe.toml").read_bytes())
    assert contents[0] == contents[1]


def failing(error: Exception) -> Target:
    def act(folder: Path) -> None:
        raise error

    return Target(name="made up", make=lambda maker, folder: None, act=act)


def test_what_is_no_refusal_fails(tmp_path: Path) -> None:
    """The fuzzing can find something."""
    for error in (
        KeyError("x"),
        RecursionError(),
        OSError("x"),
        MemoryError(),
        UnicodeEncodeError("a", "b", 0, 1, "c"),
    ):
        found = run_part(failing(error), 0, 1, tmp_path, lambda number: None)
        assert [case["case"] for case in found["failures"]] == [0]
    assert run_part(failing(UsageError("what", why="why")), 0, 1, tmp_path, lambda n: None)["refused"] == 1
    with pytest.raises(Unnamed):
        outcome_of(failing(LlmtopError("no")), maker_of(TARGETS[0], 0), tmp_path)


def test_a_case_without_end_and_one_without_bounds_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.fuzzing.running.CASE_SECONDS", 0.1)

    def for_ever(folder: Path) -> None:
        while True:
            pass

    endless = Target(name="endless", make=lambda maker, folder: None, act=for_ever)
    found = run_part(endless, 0, 1, tmp_path, lambda number: None)
    assert "TookTooLong" in found["failures"][0]["error"]
    monkeypatch.setattr("benchmarks.fuzzing.running.CASE_BYTES", 16 << 20)

    def large(folder: Path) -> None:
        bytearray(b"1") * (64 << 20)

    greedy = Target(name="greedy", make=lambda maker, folder: None, act=large)
    found = run_part(greedy, 0, 1, tmp_path, lambda number: None)
    assert "TookTooMuch" in found["failures"][0]["error"]


def test_bytes_are_throws_of_the_dice_or_the_file_itself(tmp_path: Path) -> None:
    known = {target.name: target for target in TARGETS}
    assert known.keys() >= fed.FILES.keys()
    for name, file in fed.FILES.items():
        prepared(known[name], tmp_path)
        place_of(tmp_path)
        fed.case_of(known[name], b"\1not what it should be").make(Maker(random.Random(0)), tmp_path / CASE)
        assert (tmp_path / CASE / file).read_bytes() == b"not what it should be", name
    recipe = known["recipe TOML"]
    made = []
    for content in (b"\0" + b"some throws" * 9, b"\0" + b"some throws" * 9, b"\0" + b"other throws" * 9, b""):
        place_of(tmp_path)
        fed.case_of(recipe, content).make(Maker(random.Random(0)), tmp_path / CASE)
        made.append((tmp_path / CASE / "recipe.toml").read_bytes())
    assert made[0] == made[1] and len(set(made)) == 3
    dice = fed.Fed(bytes(range(256)) * 40)
    assert {dice.randrange(6) for _ in range(200)} == set(range(6))
    assert all(0 <= dice.random() < 1 for _ in range(200))


def test_atheris_is_said_how_to_be_got(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz", "--engine", "atheris"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        fuzz.main()
    assert "pip install atheris" in capsys.readouterr().err


@pytest.mark.slow
def test_parts_go_on_where_they_were(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.jsonl"
    for cases in (20, 30):
        fuzz.run_all(out, cases, 5.0, ["hostfile"], "seeded")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["first"], row["cases"]) for row in rows] == [(0, 20), (20, 10)]
    assert fuzz.summary(rows) == 0


def test_texts_that_are_made(tmp_path: Path) -> None:
    assert dumped(Pairs([("a", Verbatim("NaN")), ("a", [1, "\x1b"])])) == '{"a":NaN,"a":[1,"\\u001b"]}'
    assert cause("/tmp/x.json: key 'abc' = 12.5 is not 3") == "_ key _ = _ is not _"
