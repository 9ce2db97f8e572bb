"""`llmtop snapshot` and its supervisor over fake ranks: handed on, answered, refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.events import ControlAnswered
from llmtop.profiler.record.snapshotevents import SnapshotAsked, SnapshotParams
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.text import render
from llmtop.trainer import control
from tests.cli.conftest import Llmtop
from tests.trainer.supervised import TIMEOUT_SECONDS, Supervised, fake_ranks


@pytest.fixture
def run(runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake_ranks(monkeypatch, "looks_closer")
    started = Supervised(runs_root, steps=1_000_000)
    started.start()
    started.wait_for_step(1)
    yield started
    started.clean_up()


def test_the_ranks_that_are_named_write_and_their_tables_are_printed(run: Supervised, llmtop: Llmtop) -> None:
    answer = llmtop("snapshot", "latest", "--what", "modules", "--ranks", "0,1")
    assert answer.code == ExitCode.DONE, answer.err
    assert "modules: about" in answer.err and "stands still" in answer.err
    assert "Modules of rank 0" in answer.out and "Modules of rank 1" in answer.out
    assert answer.out.count("model.layers.*.mlp (Mlp)") == 2
    assert str(run.run.snapshots_dir) in answer.out
    [asked] = run.of(SnapshotAsked)
    assert (asked.number, asked.ranks, asked.what) == (1, (0, 1), "modules")
    answers = [event.answer for event in run.of(ControlAnswered)]
    assert answers == ["accepted", "done"]

    told = llmtop("snapshot", "latest", "--what", "modules", "--json").json()
    assert (told["status"], told["what"]) == ("taken", "modules")
    assert [each["rank"] for each in told["ranks"]] == [0]
    assert told["ranks"][0]["table"]["rows"][0]["saved_bytes"] == 3 << 20

    report = build_report(run.run)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    text = render(report, 100)
    assert "Closer looks" in text and text.count("Modules of rank 0") == 2


def test_what_a_rank_could_not_write_is_told_in_its_words(run: Supervised, llmtop: Llmtop) -> None:
    (run.run.path / "disk-full").write_text("1")
    some = llmtop("snapshot", "latest", "--what", "modules", "--ranks", "0,1")
    assert some.code == ExitCode.DONE
    assert "Rank 1 took no snapshot (modules): No space left on device" in some.out
    none = llmtop("snapshot", "latest", "--what", "modules", "--ranks", "1")
    assert none.code == ExitCode.USAGE and "No space left on device" in none.err


def test_refusals_come_before_anything_is_asked(run: Supervised, llmtop: Llmtop) -> None:
    for words, told in (
        (("--what", "state"), "no memory snapshot"),
        (("--with-stacks",), "no memory snapshot"),
        (("--what", "trace", "--ranks", "2"), "use 0 to 1"),
        (("--what", "trace", "--ranks", "a"), "'a' is no list of ranks"),
        (("--what", "stacks", "--steps", "2"), "stacks are of now"),
    ):
        answer = llmtop("snapshot", "latest", *words)
        assert answer.code == ExitCode.USAGE and told in answer.err, answer.err
    assert llmtop("snapshot", "latest", "--what", "trace", "--dry-run").code == ExitCode.DONE
    usual = llmtop("snapshot", "latest", "--dry-run")
    assert usual.code == ExitCode.DONE and usual.err.startswith("modules: about"), usual.err
    assert control.read_requests(run.run) == []


def test_the_supervisor_refuses_by_the_same_rules_and_one_at_a_time(run: Supervised) -> None:
    (run.run.path / "silent").touch()
    asked = [
        control.snapshot(run.run, SnapshotParams(what="state")),
        control.request(run.run, control.SNAPSHOT, {"what": "a poem"}),
        control.snapshot(run.run, SnapshotParams(what="modules")),
        control.snapshot(run.run, SnapshotParams(what="trace")),
    ]
    refused = [control.wait_until_settled(run.run, asked[at], TIMEOUT_SECONDS) for at in (0, 1, 3)]
    reasons = [answer.reason for answer in refused if answer is not None]
    for reason, words in zip(reasons, ("no memory snapshot", "holds no snapshot", "under way"), strict=True):
        assert words in reason
    control.stop(run.run, save=False)
    run.end()
    last = control.wait_until_settled(run.run, asked[2], TIMEOUT_SECONDS)
    assert last is not None and (last.answer, last.reason) == ("refused", "the run has ended")
    assert not run.run.snapshot_request_path.exists()


def test_an_ended_run_is_not_looked_at(run: Supervised, llmtop: Llmtop) -> None:
    control.stop(run.run, save=False)
    run.end()
    answer = llmtop("snapshot", "latest", "--what", "trace")
    assert answer.code == ExitCode.USAGE and "it has ended" in answer.err
