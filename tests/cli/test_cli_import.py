"""`import`: options out, problems named, exit 2 for what DeepSpeed or llmtop refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.presets.resolve import parse_set
from llmtop.tui.commandline.options import option_text, setting_texts
from tests.cli.conftest import Llmtop
from tests.trainer.ds_causes import CAUSES
from tests.trainer.test_dsimport import MEANINGS

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


NOT_FATAL: dict[str, Any] = {
    **{name: config for name, (config, _key, _word, fatal) in CAUSES.items() if not fatal},
    **{name: config for name, (config, _options) in MEANINGS.items()},
}


@pytest.mark.parametrize("name", NOT_FATAL)
def test_plan_takes_every_printed_option(name: str, llmtop: Llmtop, tmp_path: Path) -> None:
    config = NOT_FATAL[name]
    file = tmp_path / "ds.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    imported = llmtop("import", str(file))
    assert imported.code == ExitCode.DONE
    assert "{}" not in imported.out
    machine = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8")
    plan = llmtop("plan", *machine, *shlex.split(imported.out))
    assert plan.code == ExitCode.DONE, (imported.out, plan.err)


def test_odd_keys_and_values_are_read_back_as_they_were() -> None:
    raw = {
        "pipeline": {"a.b": 1, "c": {"d=e": 2}},
        "wandb": {"group": "-x", " f": {"g": []}},
        "aio": {"h": 3},
    }
    merged: dict[str, Any] = {}
    for text in setting_texts("deepspeed", raw):
        flag, setting = shlex.split(text)
        assert flag == "--set"
        for key, value in parse_set(setting)["deepspeed"].items():
            merged.setdefault(key, {}).update(value)
    assert merged == raw
    assert option_text("nvme_path", "-drive") == "--nvme-path=-drive"


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


def test_lines_with_a_colon_are_no_configuration(llmtop: Llmtop, tmp_path: Path) -> None:
    """Hjson takes them for an object whose braces were left out; with a key of DeepSpeed they are one."""
    users, bare = tmp_path / "users", tmp_path / "bare.hjson"
    users.write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n")
    bare.write_text("gradient_clipping: 1.0\n")
    refused = llmtop("import", str(users))
    assert refused.code == ExitCode.USAGE and "is no DeepSpeed configuration" in refused.err
    assert "bare.hjson" in refused.err
    assert llmtop("import", str(bare)).code == ExitCode.DONE


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
