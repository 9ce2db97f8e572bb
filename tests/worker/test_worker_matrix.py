"""Every way of training that the CPU can do, on two real ranks under DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointSaved
from llmtop.profiler.record.events import (
    BaselineMeasured,
    MemoryClassified,
    ModelBuilt,
    RankFinished,
    StepFinished,
)
from llmtop.profiler.record.rundir import RunDir
from tests.worker.launching import TINY_LLAMA, events_of, log_end, make_run, run_matrix, tiny_spec

pytestmark = pytest.mark.slow

PARAMS = 123_200
"""Of the tiny Llama."""
FP32 = 4 * PARAMS
LORA = 8_192
STEPS = 4

NF4: dict[str, Any] = {"lora_rank": 4, "quantization": "nf4", "precision": "bf16"}

# ZeRO-3 last: see matrix_ranks.
CASES: dict[str, dict[str, Any]] = {
    "zero2": {"zero": 2},
    "zero1": {"zero": 1},
    "zero0": {"zero": 0},
    "accumulated": {"micro_batch": 1, "grad_accum": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "eager": {"attention": "eager"},
    "decayed": {"weight_decay": 0.1},
    "bf16": {"precision": "bf16"},
    "bf16_zero0": {"precision": "bf16", "zero": 0},
    "adam8": {"optimizer": "adamw_8bit"},
    "lora": {"lora_rank": 4},
    "lora_attention": {"lora_rank": 4, "lora_targets": "attention", "gradient_checkpointing": True},
    "nf4": NF4,
    "int8": {"lora_rank": 4, "quantization": "int8", "precision": "bf16"},
    "weights": {"weights_dir": True},
    "nf4_weights": {**NF4, "weights_dir": True},
    "zero0_saved": {"zero": 0, "steps": 2, "save_at_end": True},
    "zero0_resumed": {"zero": 0, "resumes": "zero0_saved"},
    "lora_saved": {"lora_rank": 4, "checkpoint_every": 2, "steps": 2},
    "lora_resumed": {"lora_rank": 4, "resumes": "lora_saved"},
    "nf4_saved": {
        "lora_rank": 4,
        "quantization": "nf4",
        "precision": "bf16",
        "steps": 2,
        "save_at_end": True,
    },
    "nf4_resumed": {"lora_rank": 4, "quantization": "nf4", "precision": "bf16", "resumes": "nf4_saved"},
    "zero3_nf4": {**NF4, "zero": 3},
    "nf4_at_zero3_resumed": {**NF4, "zero": 3, "resumes": "nf4_saved"},
    "zero3": {"zero": 3},
    "zero3_reentrant": {"zero": 3, "gradient_checkpointing": True, "checkpointing_reentrant": True},
    "zero3_every_second": {"zero": 3, "gradient_checkpointing": True, "checkpointing_every": 2},
    "zero3_checkpointed": {"zero": 3, "gradient_checkpointing": True},
    "zero3_weights": {"zero": 3, "weights_dir": True},
    "zero3_saved": {"zero": 3, "steps": 2, "save_at_end": True},
    "zero3_resumed": {"zero": 3, "resumes": "zero3_saved"},
    "zero3_lora_leaves": {
        "zero": 3,
        "lora_rank": 4,
        "deepspeed": {"zero_optimization": {"leaf_module": {"classes": ["LlamaDecoderLayer"]}}},
    },
    "zero3_lora_bf16": {"zero": 3, "lora_rank": 4, "precision": "bf16"},
    "lora_at_zero3_resumed": {"zero": 3, "lora_rank": 4, "resumes": "lora_saved"},
}


class Matrix:
    """What the ranks wrote, case by case."""

    def __init__(self, runs: dict[str, RunDir]) -> None:
        self.runs = runs

    def losses(self, case: str) -> list[float]:
        losses = [event.loss for event in events_of(self.runs[case], 0, StepFinished)]
        return [loss for loss in losses if loss is not None]

    def norms(self, case: str) -> list[float | None]:
        return [event.grad_norm for event in events_of(self.runs[case], 0, StepFinished)]

    def built(self, case: str) -> ModelBuilt:
        return events_of(self.runs[case], 0, ModelBuilt)[0]

    def classified(self, case: str, moment: str, step: int = 2, rank: int = 0) -> MemoryClassified:
        events = events_of(self.runs[case], rank, MemoryClassified)
        return next(event for event in events if event.moment == moment and event.step == step)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    root = tmp_path_factory.mktemp("matrix")
    weights = save_weights(root / "weights")
    runs = {}
    for name, options in CASES.items():
        chosen = {"gpus": 2, "steps": STEPS, "tokenizer": "bytes", **options}
        if chosen.pop("weights_dir", False):
            chosen["weights_dir"] = str(weights)
        resumes = chosen.pop("resumes", None)
        runs[name] = make_run(root / name, tiny_spec(**chosen))
        if resumes is not None:
            runs[name].checkpoints_dir.rmdir()
            runs[name].checkpoints_dir.symlink_to(root / resumes / "checkpoints")
    codes = run_matrix(list(runs.values()))
    first = next(iter(runs.values()))
    assert codes == [0, 0], log_end(first, 0) + log_end(first, 1)
    return Matrix(runs)


def save_weights(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(**{key: value for key, value in TINY_LLAMA.items() if key != "model_type"})
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


PAUSED = ("saved", "resumed")


@pytest.mark.parametrize("case", [name for name in CASES if not name.endswith(PAUSED)])
def test_every_case_trains(matrix: Matrix, case: str) -> None:
    losses = matrix.losses(case)
    assert len(losses) == STEPS
    # Random weights know nothing: the loss starts at the entropy of the vocabulary.
    assert losses[0] == pytest.approx(5.95, abs=0.1)
    assert all(norm is not None and norm > 0 for norm in matrix.norms(case))
    for rank in (0, 1):
        finished = events_of(matrix.runs[case], rank, RankFinished)
        assert [(event.reason, event.last_step) for event in finished] == [("completed", STEPS)]


@pytest.mark.parametrize("case", ["zero0", "lora", "nf4", "zero3"])
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_stopped(matrix: Matrix, case: str) -> None:
    straight = matrix.losses(case)
    assert matrix.losses(f"{case}_saved") == pytest.approx(straight[:2], abs=1e-6)
    assert matrix.losses(f"{case}_resumed") == pytest.approx(straight[2:], abs=1e-5)
    saved = events_of(matrix.runs[f"{case}_saved"], 0, CheckpointSaved)
    assert [event.step for event in saved] == [2]
    assert events_of(matrix.runs[f"{case}_saved"], 1, CheckpointSaved) == []


@pytest.mark.parametrize("case", ["lora", "nf4"])
def test_adapters_go_on_at_another_stage_on_the_same_random_weights(matrix: Matrix, case: str) -> None:
    resumed = matrix.losses(f"{case}_at_zero3_resumed")
    assert resumed == pytest.approx(matrix.losses(case)[2:], abs=2e-4 if case == "lora" else 5e-3)
    loaded = events_of(matrix.runs[f"{case}_at_zero3_resumed"], 1, CheckpointLoaded)
    assert [(event.step, event.zero, event.world_size, event.notes) for event in loaded] == [(2, 2, 2, ())]


def test_frozen_weights_are_not_saved(matrix: Matrix) -> None:
    sizes = {
        case: events_of(matrix.runs[f"{case}_saved"], 0, CheckpointSaved)[0].size_bytes
        for case in ("nf4", "lora", "zero3")
    }
    assert sizes["nf4"] < sizes["zero3"] / 4
    assert FP32 < sizes["lora"] < sizes["zero3"] / 2, "a base of random weights is kept, without moments"


FULL = [name for name, options in CASES.items() if "lora_rank" not in options and not name.endswith(PAUSED)]


@pytest.mark.parametrize("case", FULL)
def test_full_training_learns(matrix: Matrix, case: str) -> None:
    losses = matrix.losses(case)
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("case", ["zero1", "zero0", "accumulated", "checkpointed", "eager"])
def test_the_mathematics_does_not_depend_on_how_it_is_spread(matrix: Matrix, case: str) -> None:
    assert matrix.losses(case) == pytest.approx(matrix.losses("zero2"), abs=2e-4)
    assert matrix.norms(case) == pytest.approx(matrix.norms("zero2"), rel=2e-3)


def test_stage_3_trains_the_same_weights_to_the_same_losses(matrix: Matrix) -> None:
    assert matrix.losses("zero3_weights") == pytest.approx(matrix.losses("weights"), abs=2e-4)
    for case in ("zero3_reentrant", "zero3_checkpointed", "zero3_every_second"):
        assert matrix.losses(case) == pytest.approx(matrix.losses("zero3"), abs=2e-4)


@pytest.mark.parametrize(
    ("case", "wrapper", "optimizer"),
    [
        ("zero0", "AdamW", "AdamW"),
        ("zero2", "DeepSpeedZeroOptimizer", "AdamW"),
        ("bf16_zero0", "FP16_UnfusedOptimizer", "AdamW"),
        ("adam8", "DeepSpeedZeroOptimizer", "AdamW8bit"),
        ("zero3", "DeepSpeedZeroOptimizer_Stage3", "AdamW"),
    ],
)
def test_the_event_names_what_really_runs(matrix: Matrix, case: str, wrapper: str, optimizer: str) -> None:
    built = matrix.built(case)
    assert (built.engine_optimizer, built.optimizer) == (wrapper, optimizer)
    assert built.attention == "sdpa"
    assert built.weights_type == ("bf16" if case == "bf16_zero0" else "fp32")
    assert matrix.built("eager").attention == "eager"
    assert {"torch", "deepspeed", "transformers"} <= set(built.versions)


@pytest.mark.parametrize("case", ["zero2", "zero3", "weights", "zero3_weights"])
def test_parameters_are_counted_whole(matrix: Matrix, case: str) -> None:
    built = matrix.built(case)
    assert (built.params, built.trainable_params) == (PARAMS, PARAMS)


@pytest.mark.parametrize("case", ["lora", "nf4", "int8", "nf4_weights", "zero3_nf4", "zero3_lora_bf16"])
def test_adapters_are_counted_apart_from_packed_weights(matrix: Matrix, case: str) -> None:
    built = matrix.built(case)
    assert (built.params, built.trainable_params) == (PARAMS + LORA, LORA)


def test_attention_adapters_are_fewer(matrix: Matrix) -> None:
    assert 0 < matrix.built("lora_attention").trainable_params < LORA


STATES: list[tuple[str, dict[str, float]]] = [
    ("zero0", {"parameters": FP32, "optimizer_state": 2 * FP32}),
    ("zero1", {"parameters": FP32, "master_parameters": FP32 / 2, "optimizer_state": FP32}),
    ("zero2", {"parameters": FP32, "master_parameters": FP32 / 2, "optimizer_state": FP32}),
    ("bf16", {"parameters": FP32 / 2, "master_parameters": FP32 / 2, "optimizer_state": FP32}),
    (
        "bf16_zero0",
        {"parameters": FP32 / 2, "master_parameters": FP32, "optimizer_state": 2 * FP32},
    ),
    ("lora", {"parameters": FP32 + 4 * LORA, "master_parameters": 2 * LORA, "optimizer_state": 4 * LORA}),
]


@pytest.mark.parametrize(("case", "expected"), STATES, ids=[case for case, _ in STATES])
def test_states_between_steps_are_what_arithmetic_says(
    matrix: Matrix, case: str, expected: dict[str, float]
) -> None:
    """Padding and Adam's step counters are the only slack."""
    held = dict(matrix.classified(case, "between_steps").components)
    held.pop("fragmentation", None)
    assert held == pytest.approx(expected, rel=0.005)


def test_stage_3_holds_shards_a_gradient_buffer_and_the_gathered_model(matrix: Matrix) -> None:
    held = matrix.classified("zero3", "between_steps").components
    assert held["master_parameters"] == pytest.approx(FP32 / 2, rel=0.005)
    assert held["gradients"] == pytest.approx(FP32 / 2, rel=0.005)
    # Every tensor of this model is below the threshold under which stage 3 keeps it gathered.
    assert held["parameters"] == pytest.approx(1.5 * FP32, rel=0.005)
    assert 0 < held["communication_buffers"] <= 2_000_000


@pytest.mark.parametrize("case", ["zero3", "zero3_lora_bf16", "zero3_nf4", "nf4", "int8"])
def test_weights_and_their_scales_between_steps_are_predicted(matrix: Matrix, case: str) -> None:
    """Of this model every tensor is small enough for stage 3 to keep it whole beside its share."""
    held = matrix.classified(case, "between_steps").components
    steady = next(m for m in predict(matrix.runs[case].spec()).moments if m.name is Moment.STEADY)
    assert steady.components[Component.PARAMETERS] == pytest.approx(held["parameters"], rel=0.002)


def test_8_bit_optimizer_states_are_a_quarter(matrix: Matrix) -> None:
    held = matrix.classified("adam8", "between_steps").components
    assert held["optimizer_state"] == pytest.approx(FP32 / 4 * (1 + 4 / 256), rel=0.03)


def test_packed_weights_are_small(matrix: Matrix) -> None:
    full = matrix.classified("lora", "between_steps").components["parameters"] / 2
    assert matrix.classified("nf4", "between_steps").components["parameters"] < 0.7 * full
    assert matrix.classified("int8", "between_steps").components["parameters"] < 0.8 * full


@pytest.mark.parametrize("case", ["zero1", "zero2", "bf16"])
def test_gradients_are_alive_after_backward_and_gone_after_the_step(matrix: Matrix, case: str) -> None:
    share = matrix.classified("zero2", "between_steps").components["master_parameters"]
    width = 1 if case == "bf16" else 2
    after_backward = matrix.classified(case, "first_block_backward").components["gradients"]
    # A tensor that straddles the border of two ranks' shares is kept whole.
    assert share * width / 2 <= after_backward <= share * width / 2 + 32_768 * 2 * width
    assert "gradients" in matrix.classified(case, "optimizer_step").components
    assert "gradients" not in matrix.classified(case, "between_steps").components


def test_optimizer_states_appear_in_the_first_step(matrix: Matrix) -> None:
    assert "optimizer_state" not in matrix.classified("zero2", "end_of_forward", step=1).components
    assert "optimizer_state" in matrix.classified("zero2", "optimizer_step", step=1).components


def test_recomputation_keeps_only_block_inputs(matrix: Matrix) -> None:
    plain = matrix.classified("zero2", "end_of_forward").components
    less = matrix.classified("checkpointed", "end_of_forward").components
    tokens, hidden, layers, vocab = 2 * 32, 64, 2, 384
    assert less["activations"] < plain["activations"] / 3
    assert less["activations"] >= layers * tokens * hidden * 4
    assert less["logits"] == plain["logits"] == tokens * vocab * 4


def test_every_second_block_keeps_its_activations_at_stage_3(matrix: Matrix) -> None:
    none, every, second = (
        matrix.classified(case, "end_of_forward").components["activations"]
        for case in ("zero3", "zero3_checkpointed", "zero3_every_second")
    )
    # Of two blocks, one is recomputed: half way between, but for what lies outside the blocks.
    assert second == pytest.approx((none + every) / 2, rel=0.05)


@pytest.mark.parametrize("case", ["zero0", "zero1", "zero2", "zero3"])
def test_the_resident_set_is_the_runtime_and_what_was_classified(matrix: Matrix, case: str) -> None:
    """All runs share one process here, so only the first could be compared exactly; the rest has a bound."""
    baseline = events_of(matrix.runs[case], 0, BaselineMeasured)[0].rss_bytes
    total = matrix.classified(case, "between_steps").total_bytes
    assert baseline is not None and total is not None
    assert abs(total - baseline) < 64 << 20


def test_times_and_memory_of_every_phase_are_reported(matrix: Matrix) -> None:
    for event in events_of(matrix.runs["zero2"], 0, StepFinished):
        assert (
            set(event.phase_seconds)
            == set(event.phase_memory)
            == {
                "data",
                "forward",
                "backward",
                "optimizer",
            }
        )
        spent = sum(seconds or 0 for seconds in event.phase_seconds.values())
        assert 0 < spent <= event.step_seconds
        for memory in event.phase_memory.values():
            assert memory.allocated_bytes is not None and memory.peak_bytes is not None
            assert memory.peak_bytes >= memory.allocated_bytes > 0
        assert event.tokens == 2 * 2 * 32


def test_only_rank_0_tells_the_loss(matrix: Matrix) -> None:
    assert [event.loss for event in events_of(matrix.runs["zero2"], 1, StepFinished)] == [None] * STEPS
