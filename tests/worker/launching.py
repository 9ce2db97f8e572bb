"""Makes run directories by hand and starts real ranks in them, without a supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llmtop.presets.spec import GpuSpec, ModelShape, RunOptions, RunSpec
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.supervisor.rankenv import free_port
from tests.worker.warm import ForkedRank, warm

Rank = subprocess.Popen[bytes] | ForkedRank

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
CPU = GpuSpec(name="cpu", kind="cpu")


def tiny_spec(hf_config: dict[str, Any] | None = None, **options: Any) -> RunSpec:
    """A run of a tiny Llama on the CPU."""
    config = {**TINY_LLAMA, **(hf_config or {})}
    shape = ModelShape(
        name="tiny",
        family=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
    )
    chosen = {
        "model": "tiny",
        "gpu": "cpu",
        "gpus": 1,
        "zero": 2,
        "precision": "fp32",
        "micro_batch": 2,
        "seq_len": 32,
        "steps": 3,
        "learning_rate": 1e-3,
        "lr_schedule": "constant",
        **options,
    }
    weights_dir = chosen.pop("weights_dir", None)
    return RunSpec(
        name="test",
        options=RunOptions(**chosen),
        model=shape,
        gpu=CPU,
        model_source="tiny.toml",
        hf_config=config,
        weights_dir=weights_dir,
    )


def deepspeed_config(spec: RunSpec) -> dict[str, Any]:
    """What the ranks of a test run need, without any op that must be compiled."""
    options = spec.options
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.grad_accum,
        "gradient_clipping": options.max_grad_norm,
        "zero_optimization": {
            **{"stage": options.zero, "reduce_bucket_size": 500_000},
            **options.deepspeed.get("zero_optimization", {}),
        },
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},
    }
    if options.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if options.optimizer == "adamw":
        parameters = {
            "lr": options.learning_rate,
            "betas": [options.adam_beta1, options.adam_beta2],
            "eps": options.adam_epsilon,
            "weight_decay": options.weight_decay,
            "torch_adam": True,
        }
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    return config


def make_run(folder: Path, spec: RunSpec) -> RunDir:
    """A run directory as a launch would leave it, but without a prediction."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    (folder / "deepspeed.json").write_bytes(msgspec.json.encode(deepspeed_config(spec)))
    return RunDir.open(folder)


def start_ranks(run: RunDir, command: list[str] | None = None, *, forked: bool = True) -> list[Rank]:
    """Start every rank of a run; each writes its own log. `command`: of Python; by default the worker's.

    Unless they are to be processes of their own from the first import on, they are forked.
    """
    command = command or [sys.executable, "-m", "llmtop.trainer.worker", str(run.path)]
    logs = [run.log_path(rank) for rank in range(run.spec().world_size)]
    if forked:
        return fork_ranks(command[1:], logs)
    processes: list[Rank] = []
    for environment, path in zip(_environments(len(logs)), logs, strict=True):
        with path.open("ab") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def fork_ranks(words: list[str], logs: list[Path]) -> list[Rank]:
    """A rank for each log, of the program that follows the interpreter in a command."""
    environments = _environments(len(logs))
    return [warm().start(words, one, log) for one, log in zip(environments, logs, strict=True)]


def _environments(world_size: int) -> list[dict[str, str]]:
    port = free_port()
    return [
        {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        for rank in range(world_size)
    ]


def wait_for_ranks(processes: list[Rank], timeout: float = 240) -> list[int]:
    """Exit codes of all ranks; those that are left when one does not end in time are killed."""
    try:
        return [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(timeout)


def run_ranks(run: RunDir, *, forked: bool = True) -> list[int]:
    return wait_for_ranks(start_ranks(run, forked=forked))


def run_module(module: str, *words: str, log: Path, timeout: float = 280) -> None:
    """A module as a program, forked from a process that has its libraries loaded; it must end well."""
    program = warm().start(["-m", module, *words], os.environ, log)
    codes = wait_for_ranks([program], timeout)
    assert codes == [0], log.read_text(errors="replace")[-4000:]


def run_matrix(runs: list[RunDir], timeout: float = 280) -> list[int]:
    """Train several runs of one world size in one set of processes; logs go to the first run."""
    script = Path(__file__).with_name("matrix_ranks.py")
    command = [sys.executable, str(script), *(str(run.path) for run in runs)]
    return wait_for_ranks(start_ranks(runs[0], command), timeout)


Kind = TypeVar("Kind")


def events_of(run: RunDir, rank: int, kind: type[Kind]) -> list[Kind]:
    """A rank's events of one kind, in order."""
    return [event for event in EventTail(run.events_path(rank)).poll() if isinstance(event, kind)]


def log_end(run: RunDir, rank: int) -> str:
    """For a failing assertion's message."""
    return run.log_path(rank).read_text(errors="replace")[-3000:]
