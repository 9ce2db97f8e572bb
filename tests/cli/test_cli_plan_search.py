"""`plan --explain`, `--sweep` and `--where` as a person and a script call them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.profiler.cost.where import WhereRow
from llmtop.profiler.memory.predict import Brief
from llmtop.tui.commands.plan_search import where_lines
from tests.cli.conftest import Llmtop

EIGHT = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "4")


def test_explain_shows_formulas_and_sources_at_the_peak(llmtop: Llmtop) -> None:
    answer = llmtop("plan", *EIGHT, "--zero", "1", "--explain")
    assert answer.code == ExitCode.DONE
    assert "master parameters = 8,030,261,248 trained weights / 4 GPUs x 4 B = 8,030,261,248 B" in answer.out
    assert "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py" in answer.out
    assert answer.out.splitlines()[0].endswith(" B, the peak")
    assert "the verdict" in answer.out and "the host" in answer.out
    assert all(len(line) <= 100 for line in answer.out.splitlines())


@pytest.mark.parametrize("which", ["peak", "all"])
def test_explain_tells_each_source_once_and_every_number_has_one(which: str, llmtop: Llmtop) -> None:
    text, _, told = llmtop("plan", *EIGHT, "--zero", "3", "--explain", which).out.partition(
        "\nwhere the rules come from\n"
    )
    sources = [line.split("] ", 1) for line in told.splitlines()]
    assert len({source for _, source in sources}) == len(sources) > 5
    assert set(re.findall(r"\[(\d+)\]", text)) == {number.strip(" [") for number, _ in sources}
    assert "bitsandbytes" not in told and "iger" not in told


def test_explain_takes_one_moment_or_all_and_a_recipe_after_it(llmtop: Llmtop) -> None:
    every = llmtop("plan", "cpu-demo", "--explain", "all").out
    assert every.count("one process, ") == 7
    one = llmtop("plan", "cpu-demo", "--explain", "between_steps").out
    assert one.startswith("one process, between steps") and one.count("one process, ") == 1
    assert llmtop("plan", "--explain", "cpu-demo").out == llmtop("plan", "cpu-demo", "--explain").out


def test_explain_json_has_every_moment(llmtop: Llmtop) -> None:
    answer: dict[str, Any] = llmtop("plan", *EIGHT, "--explain", "--json").json()
    moments = answer["explanation"]["moments"]
    assert len(moments) == 7
    for moment in moments:
        for part in moment["components"]:
            assert part["value"] == sum(term["value"] for term in part["terms"])


def test_a_sweep_is_a_table_with_what_was_refused(llmtop: Llmtop) -> None:
    answer = llmtop(
        "plan", *EIGHT, "--sweep", "micro_batch=1..8,zero=0..3,offload_param=none|cpu", "--rows", "5"
    )
    assert answer.code == ExitCode.DONE
    lines = answer.out.splitlines()
    assert lines[0].startswith("32 candidates, ") and "12 refused" in lines[0]
    assert lines[2].split()[:3] == ["micro", "zero", "params"]
    assert "more; --rows N shows more" in answer.out
    assert "offload_param needs stage 3: only stage 3 shards" in answer.out


def test_a_sweep_shows_what_its_verdicts_compare(llmtop: Llmtop) -> None:
    """An allocated peak may lie below the limit where the run does not fit."""
    asked = ("--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--zero", "3", "--offload-optimizer", "cpu")
    answer = llmtop("plan", *asked, "--offload-param", "cpu", "--sweep", "micro_batch=1..2").out.splitlines()
    assert answer[2].split()[:3] == ["micro", "fits", "needs"]
    assert answer[3].split()[:3] == ["1", "no", "24.2"]


def test_a_sweep_of_which_nothing_fits_names_a_way_that_does(llmtop: Llmtop) -> None:
    asked = ("plan", "--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "2")
    told = " ".join(llmtop(*asked, "--sweep", "micro_batch=1..64,zero=0..3").out.split())
    assert " 0 fit" in told
    words = told.partition("what fits: ")[2].partition(": ")[2].partition(";")[0]
    assert "verdict: fits" in llmtop(*asked, *words.split()).out
    assert "of the first, what fits: " in told
    assert "what fits: " not in llmtop("plan", *EIGHT, "--sweep", "micro_batch=1..2").out


def test_a_sweep_as_json_has_all_rows(llmtop: Llmtop) -> None:
    answer = llmtop("plan", *EIGHT, "--sweep", "micro_batch=1..4,attention=eager|sdpa", "--json").json()
    assert answer["candidates"] == len(answer["rows"]) == 6
    assert set(answer["rows"][0]["settings"]) == {"micro_batch", "attention"}
    assert set(answer["rows"][0]["prediction"]) >= {"fits", "step_seconds", "tokens_per_second", "host_bytes"}


def test_a_sweep_need_not_start_from_what_can_run(llmtop: Llmtop) -> None:
    answer = llmtop("plan", *EIGHT, "--offload-param", "cpu", "--sweep", "zero=0..3", "--json").json()
    assert [row["settings"]["zero"] for row in answer["rows"]] == [3]


def test_a_sweep_says_that_it_is_for_the_cpu_where_nobody_chose(llmtop: Llmtop) -> None:
    told = llmtop("plan", "cpu-demo", "--sweep", "zero=0..1")
    assert told.code == ExitCode.DONE and "note: this machine has no GPU" not in told.err
    fallen = llmtop("plan", "--model", "gpt2", "--sweep", "zero=0..1")
    seen = llmtop("plan", "--model", "gpt2")
    assert fallen.err == seen.err


def test_where_takes_a_model_alone(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "llama-3.1-8b", "--where")
    assert answer.code == ExitCode.DONE and "estimate" in answer.out
    assert "searched: micro_batch 1 to 64, zero 0 to 3" in answer.out
    assert "fits nowhere" in answer.out and "short by" in answer.out
    assert all(len(line) <= 100 for line in answer.out.splitlines())
    assert "the same" not in llmtop("plan", "--model", "llama-3.1-8b", "--where").out
    assert llmtop("plan", "--model", "llama-3.1-8b", "--where").out == answer.out


def test_where_tells_what_each_host_needs(llmtop: Llmtop) -> None:
    """Weights and optimizer that a GPU has no room for lie in the host's memory."""
    answer = llmtop("plan", "llama-3.1-70b", "--where", "--allow", "offload,8bit,liger")
    head, *rows = answer.out.split("\n\n")[1].splitlines()
    assert "host" in head.split() and all(len(line) <= 80 for line in (head, *rows[:14]))
    at = head.index("host")
    assert all(row[: at + 4].endswith("1.91 TiB") for row in rows if row.startswith(("a10g", "t4")))
    assert "host is what each host must have, which is not checked" in answer.out


def where_row(gpu: str, **settings: object) -> WhereRow:
    brief = Brief(
        fits=True,
        peak_allocated_bytes=1 << 34,
        needed_bytes=1 << 34,
        device_memory_bytes=1 << 36,
        host_bytes=2 << 40,
        step_seconds=1.0,
        tokens_per_second=12_345.0,
    )
    return WhereRow(
        gpu=gpu,
        gpu_memory_bytes=1 << 36,
        gpus=8,
        settings={"gpus": 8, "micro_batch": 2, **settings},
        brief=brief,
        kwh_per_million_tokens=0.0123,
        why="",
    )


@pytest.mark.parametrize("width", [60, 70, 80])
def test_the_host_column_stays_where_there_is_little_room(width: int) -> None:
    rows = [where_row(gpu, zero=zero) for zero, gpu in enumerate(("a100-40gb", "h100-80gb"))]
    lines = where_lines(rows, width)
    assert all(len(line) <= width and "2.00 TiB" in line for line in lines.rows) and "host" in lines.head


def test_the_speed_and_energy_that_a_gpu_is_chosen_by_stay_where_every_setting_differs() -> None:
    """In the app at 80 columns, and of a search that was allowed everything in those that are seen there."""
    usual = [
        where_row("a100-40gb", zero=0, gradient_checkpointing=True, precision="bf16"),
        where_row("v100-32gb", micro_batch=16, zero=3, gradient_checkpointing=False, precision="fp16"),
    ]
    lines = where_lines(usual, 77)
    assert all(len(line) <= 77 for line in (lines.head, *lines.rows))
    assert " ".join(lines.head.split()) == "GPU GPUs tok/s Wh/M needs host micro zero ckpt type"
    more = {"offload_optimizer": "cpu", "offload_param": "cpu", "optimizer": "adamw_8bit", "liger": True}
    less = {"offload_optimizer": "none", "offload_param": "none", "optimizer": "adamw", "liger": False}
    all_else = [
        replace(row, settings={**row.settings, **differs})
        for row, differs in zip(usual, (more, less), strict=True)
    ]
    lines = where_lines(all_else, 77)
    assert all(re.search(r"12,345 +12\.3 ", line[:40]) for line in lines.rows)
    assert "Wh/M" in lines.head[:40] and lines.head.endswith("type  opt   params  optim       liger")


def test_where_looks_at_the_count_that_was_typed(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "llama-3.1-8b", "--where", "--gpus", "2", "--json").json()
    assert {row["gpus"] or row["tried_gpus"] for row in answer["rows"]} == {2}


def test_where_for_one_kind_as_json(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "qlora-nf4", "--where", "--gpu", "h100", "--allow", "8bit,liger", "--json").json()
    (row,) = answer["rows"]
    assert row["gpu"] == "h100-80gb" and row["gpus"] == 1 and row["kwh_per_million_tokens"] > 0
    assert set(answer["space"]) >= {"optimizer", "liger"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--explain", "--where"), "different questions"),
        (("--rows", "3"), "--rows is of --sweep"),
        (("--allow", "liger"), "--allow is of --where"),
        (("--where", "--allow", "lige"), "did you mean 'liger'"),
        (("--explain", "nonsense"), "not a moment"),
        (("--sweep", "zero=0..3", "--rows", "0"), "--rows"),
        (("--sweep", "nothing=1"), "unknown option 'nothing'"),
        (("--sweep", "deepspeed.=1"), "KEY=VALUE"),
        (("--sweep", "deepspeed.zero_optimization.reduce_bucket_size=big"), "a number of elements"),
        (("--sweep", "deepspeed.zero_optimisation.stage=1"), "zero_optimization"),
    ],
)
def test_wrong_questions_are_told(words: tuple[str, ...], said: str, llmtop: Llmtop) -> None:
    answer = llmtop("plan", "cpu-demo", *words)
    assert answer.code == ExitCode.USAGE and said in answer.err
