"""The command that a plan shows is the run that it launches."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from llmtop.tui.asking.launchtext import launch_command
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import CommandParser
from llmtop.tui.commands import run as run_command
from llmtop.tui.plans.planning import Draft, evaluate
from tests.tui.tuiruns import MACHINE

EDITS: tuple[dict[str, Any], ...] = (
    {},
    {"gpus": "4", "micro_batch": "2", "learning_rate": "3e-5"},
    {"liger": True, "gradient_checkpointing": "false", "zero": 3},
    {"liger": "true", "liger_kernels": "rope,glu", "lora_rank": "8", "lora_alpha": "none"},
    {"offload_optimizer": "nvme", "nvme_path": "/a folder/x", "zero": "3"},
    {"deepspeed": "zero_optimization.reduce_bucket_size=2e8 zero_optimization.overlap_comm=false"},
    {"deepspeed.zero_optimization.reduce_bucket_size": 300_000_000},
    {"data": "/tmp/it's text.txt", "model": "smollm2-135m", "precision": "fp32"},
)


def typed(command: str) -> argparse.Namespace:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("llmtop", "run")
    parser = CommandParser("run", "", "launch", "llmtop run")
    run_command.add_arguments(parser)
    return parser.parse(words)


@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("recipe", ["test-8b", None])
def test_the_command_typed_in_a_shell_is_the_same_run(recipe: str | None, edits: dict[str, Any]) -> None:
    given = {"model": "llama-3.1-8b", "gpu": "h200", "gpus": 2, **edits} if recipe is None else edits
    plan = evaluate(Draft(recipe=recipe, edits=given), MACHINE)
    assert plan.spec is not None, plan.what
    command = launch_command(plan.draft, plan.spec)
    again = options.assemble_run(typed(command), {})
    assert again.options == plan.spec.options and again.model == plan.spec.model


def test_devices_are_named_before_it() -> None:
    plan = evaluate(Draft(recipe="test-8b"), MACHINE)
    assert plan.spec is not None
    assert launch_command(plan.draft, plan.spec, "GPU-aa,GPU-bb") == (
        "CUDA_VISIBLE_DEVICES=GPU-aa,GPU-bb llmtop run test-8b"
    )
