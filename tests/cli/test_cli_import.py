"""`import`: options out, problems named, exit 2 for what DeepSpeed or llmtop refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from llmtop.presets.errors import ExitCode
from tests.cli.conftest import Llmtop

CONFIG = {
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 2e8,
    },
}


def write(folder: Path, config: object) -> str:
    file = folder / "ds.json"
    file.write_text(json.dumps(config))
    return str(file)


def test_the_printed_options_mean_the_same_run(llmtop: Llmtop, tmp_path: Path) -> None:
    file = write(tmp_path, CONFIG)
    answer = llmtop("import", file)
    assert answer.code == ExitCode.DONE
    words = shlex.split(answer.out)
    assert words[words.index("--zero") + 1] == "3"
    model = ("--model", "llama-3.1-8b", "--gpu", "h200", "--gpus", "4")
    by_options = llmtop("plan", *model, *words, "--json").json()
    by_file = llmtop("plan", *model, "--deepspeed-config", file, "--json").json()
    for plan in (by_options, by_file):
        plan["spec"].pop("provenance")
    assert by_file["spec"]["options"].pop("deepspeed_config") == file
    assert by_options["spec"]["options"].pop("deepspeed_config") is None
    assert by_options == by_file


def test_import_json(llmtop: Llmtop, tmp_path: Path) -> None:
    imported = llmtop("import", write(tmp_path, CONFIG), "--json").json()
    assert imported["fatal"] is False
    assert imported["options"]["zero"] == 3
    assert imported["options"]["offload_optimizer"] == "cpu"
    assert imported["options"]["grad_accum"] == 8
    assert "--zero 3" in imported["command_line"]


def test_a_fatal_problem_ends_import_and_plan_with_2(llmtop: Llmtop, tmp_path: Path) -> None:
    config = {**CONFIG, "fp16": {"enabled": True}}
    file = write(tmp_path, config)
    answer = llmtop("import", file, "--json")
    assert answer.code == ExitCode.USAGE
    assert any(problem["fatal"] and problem["fix"] for problem in answer.json()["problems"])
    assert "error: " in answer.err
    plan = llmtop("plan", "cpu-demo", "--deepspeed-config", file)
    assert plan.code == ExitCode.USAGE
    assert file in plan.err


def test_a_lesser_problem_is_told_and_no_more(llmtop: Llmtop, tmp_path: Path) -> None:
    file = write(tmp_path, {**CONFIG, "offload_optimizer": {"device": "cpu"}})
    answer = llmtop("import", file)
    assert "offload_optimizer" in answer.err


def test_a_models_configuration_is_told_as_one(llmtop: Llmtop, tmp_path: Path) -> None:
    file = write(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    answer = llmtop("import", file)
    assert answer.code == ExitCode.USAGE
    assert f"llmtop plan --model {file}" in answer.err
    assert answer.out == ""


def test_a_file_that_is_not_there(llmtop: Llmtop, tmp_path: Path) -> None:
    answer = llmtop("import", str(tmp_path / "none.json"))
    assert answer.code == ExitCode.USAGE
    assert "none.json" in answer.err
