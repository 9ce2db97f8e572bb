"""`llmtop tune` as a command, as far as it starts no training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import changed
from llmtop.trainer.tune.journal import Asked, Line, TuneDir, tunes_root
from llmtop.trainer.tune.judged import judged
from llmtop.trainer.tune.outcome import recipe_text
from llmtop.trainer.tune.space import choice_of
from llmtop.tui.commandline import options
from tests.cli.conftest import Llmtop


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_dry_run_ranks_and_starts_nothing(llmtop: Llmtop) -> None:
    words = ("tune", "--model", "qwen2.5-0.5b", "--gpu", "h200", "--grad-accum", "4", "--dry-run")
    text = llmtop(*words).out
    assert "the fastest by prediction" in text and "predicted not to fit" in text
    space = llmtop(*words, "--fix", "zero=1", "--allow", "attention=sdpa", "--json").json()
    assert {c["choice"]["zero"] for c in space["candidates"]} == {1}


def test_without_predicted_times_it_is_no_ranking_by_speed(
    llmtop: Llmtop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for words in (("cpu-demo",), ("cpu-demo", "--gpus", "1")):
        told = one_line(llmtop("tune", *words, "--dry-run").out)
        assert "fastest" not in told and "by how little work it is" in told and "llmtop calibrate" in told


def test_the_help_says_what_is_tried_first(llmtop: Llmtop) -> None:
    assert "the first of the starting setting" in one_line(llmtop("tune", "--help").out)


def test_the_edges_by_prediction(llmtop: Llmtop) -> None:
    for question in ("--max-batch", "--max-length"):
        model = ("--model", "llama-3.2-1b", "--gpu", "h200", "--gradient-checkpointing")
        edge = llmtop("tune", *model, question, "--dry-run", "--json").json()
        assert edge["largest"] == edge["predicted"] > 1 and edge["source"] == "predicted"
    on_cpu = llmtop("tune", "cpu-demo", "--max-batch")
    assert on_cpu.code == ExitCode.DONE and "predicted only: on the CPU" in " ".join(on_cpu.out.split())


def test_where_no_size_fits_the_best_way_is_named(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "2")
    for question in ("--max-batch", "--max-length"):
        told = llmtop("tune", *words, question, "--dry-run")
        assert told.code == ExitCode.DOES_NOT_FIT
        assert "what fits: ZeRO-3 + Liger kernels" in one_line(told.out) and "--zero 3 --liger" in told.out
    nothing = ("--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--seq-len", "131072")
    assert "no other setting" in one_line(llmtop("tune", *nothing, "--max-batch", "--dry-run").out)


H200 = ("tune", "--model", "llama-3.2-1b", "--gpu", "h200")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tune", "cpu-demo", "--fix", "zerro"), "did you mean 'zero'?"),
        (("tune", "--resume", "nothing"), "there is no search 'nothing'"),
        (("tune", "--resume", ""), "no search is named"),
        (("tune", "cpu-demo", "--resume", "x"), "--resume takes no cpu-demo"),
        (("tune", "--resume", "x", "--micro-batch", "2"), "--resume takes no --micro-batch"),
        (("tune", "--resume", "x", "--set", "seed=2"), "--resume takes no --set"),
        (("tune", "--resume", "x", "--no-liger"), "--resume takes no --liger"),
        (("tune", "--resume", "x", "--fix", "zero"), "--resume takes no --fix"),
        (("tune", "cpu-demo", "--trials", "0"), "--trials: '0' is no whole number from 1 to"),
        (("tune", "cpu-demo", "--trials", "x"), "--trials: 'x' is no whole number"),
        (("tune", "cpu-demo", "--minutes", "-1"), "--minutes: '-1' is no number above 0"),
        ((*H200, "--max-batch", "--fix", "zero"), "--fix goes with a search for the fastest"),
        ((*H200, "--max-length", "--allow", "zero=1"), "--allow goes with a search for the fastest"),
        ((*H200, "--max-batch", "--trials", "2"), "--trials goes with a search for the fastest"),
        ((*H200, "--max-batch", "--minutes", "2"), "--minutes goes with a search for the fastest"),
        ((*H200, "--fix", "zero", "--allow", "zero=1", "--dry-run"), "zero is told already by --allow"),
        ((*H200, "--allow", "micro_batch=1", "--fix", "grad_accum=1"), "micro_batch is told already"),
        ((*H200, "--allow", "deepspeed.x=1", "--dry-run"), "deepspeed.x: is no key of DeepSpeed"),
        ((*H200, "--allow", "checkpointing=99", "--dry-run"), "a model that has 16"),
        ((*H200, "--fix", "deepspeed.gradient_clipping", "--dry-run"), "the run sets no deepspeed.grad"),
        (
            ("tune", "--model", "llama-3.1-70b", "--gpu", "t4", "--fix", "zero", "--dry-run",
             "--fix", "offload_optimizer"),
            "nothing is left to try",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told(words: tuple[str, ...], told: str, llmtop: Llmtop) -> None:
    answer = llmtop(*words)
    assert answer.code == ExitCode.USAGE and told in answer.err and answer.out == "", answer
    assert "_whole" not in answer.err and "_positive" not in answer.err


def test_a_damaged_search_says_what_to_do(llmtop: Llmtop, runs_root: Path) -> None:
    folder = runs_root / "tunes" / "20260101-000000-x-0000"
    folder.mkdir(parents=True)
    (folder / "tune.json").write_text('{"spec": 1')
    answer = llmtop("tune", "--resume", "latest")
    assert answer.code == ExitCode.USAGE and "start a new one" in answer.err


def resolved(*words: str) -> RunSpec:
    """What a command's options come to."""
    parser = argparse.ArgumentParser()
    options.add_run_arguments(parser)
    return options.resolve_run(parser.parse_args(words))


def test_a_search_whose_data_have_gone_makes_no_trial(
    llmtop: Llmtop, runs_root: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 5000)
    tune = TuneDir.create(tunes_root(), Asked(spec=resolved("cpu-demo", "--data", str(text))))
    text.unlink()
    answer = llmtop("tune", "--resume", "latest")
    assert answer.code == ExitCode.USAGE and f"{text} does not exist" in answer.err
    assert tune.lines() == [], "each trial would fail by the same"
    space = judged(tune.asked(), here=False)
    start = choice_of(tune.asked().spec, space.knobs)
    made = Line(
        event="ended", number=1, choice=start, change={}, at=0.0, outcome="measured", step_seconds=0.5
    )
    tune.append(made)
    answer = llmtop("tune", "--resume", "latest", "--trials", "2")
    assert answer.code == ExitCode.USAGE and f"{text} does not exist" in answer.err
    shown = llmtop("tune", "--resume", "latest", "--trials", "1", "--json")
    assert shown.code == ExitCode.DONE, "what was found needs no data"
    assert json.loads(shown.out)["best"]["step_seconds"] == 0.5
    assert len(tune.lines()) == 1


def test_a_search_that_began_with_words_that_are_refused_since_is_shown(
    llmtop: Llmtop, runs_root: Path
) -> None:
    asked = Asked(spec=resolved("cpu-demo"), fix=("seed=7", "zero"), allow=("learning_rate=1e-4,1e-5",))
    TuneDir.create(tunes_root(), asked)
    answer = llmtop("tune", "--resume", "latest", "--dry-run")
    assert answer.code == ExitCode.DONE and "0 of" in answer.out
    fresh = llmtop("tune", "cpu-demo", "--dry-run", "--allow", "learning_rate=1e-4,1e-5")
    assert fresh.code == ExitCode.USAGE and "give --learning-rate instead" in fresh.err
    assert llmtop("tune", "cpu-demo", "--dry-run", "--fix", "seed=7").code == ExitCode.DONE


def test_the_recipe_that_is_found_wins_over_the_deepspeed_file_of_the_start(
    llmtop: Llmtop, tmp_path: Path
) -> None:
    file, recipe = tmp_path / "ds.json", tmp_path / "best.toml"
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
    }
    file.write_text(json.dumps(given))
    won = changed(
        resolved("cpu-demo", "--deepspeed-config", str(file)), {"zero": 3, "micro_batch": 8, "grad_accum": 1}
    )
    recipe.write_text(recipe_text(won, "found"))
    again = resolved(str(recipe)).options
    assert (again.zero, again.micro_batch, again.grad_accum) == (3, 8, 1)
    assert again.max_grad_norm == 0.5
    assert again.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1_000_000}}


def test_a_narrow_terminal_gets_lines_that_fit(llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 60, 100):
        monkeypatch.setattr("llmtop.tui.commands.tune.text_width", lambda columns=columns: columns)
        lines = llmtop(*H200, "--grad-accum", "4", "--dry-run").out.splitlines()
        assert max(map(len, lines)) <= columns
        assert sum("tokens/s" in line for line in lines) >= 1


def test_the_largest_that_fits_is_refused_where_the_optimizer_is_known_to_fail(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "h200", "--zero", "2", "--optimizer", "adamw_8bit")
    fixed = ("--fix", "zero", "--fix", "offload_param", "--fix", "offload_optimizer")
    for question in (fixed, ("--max-batch",), ("--max-length",)):
        answer = llmtop("tune", *words, *question, "--dry-run")
        assert answer.code == ExitCode.USAGE and "32 bits" in answer.err
