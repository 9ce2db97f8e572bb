"""Quantization-aware training for real: two ranks under ZeRO 0 to 2, by torchao on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.effects import evidence
from llmtop.profiler.record.checkpointevents import CheckpointLoaded
from llmtop.profiler.record.events import ModelBuilt, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from tests.worker.launching import events_of, log_end, make_run, run_matrix, tiny_spec

torchao = pytest.importorskip("torchao", reason="the extra `qat` is not installed")

STEPS = 4
LAYERS, MATRICES = 2, 7
CASES: dict[str, dict[str, Any]] = {
    "plain": {"zero": 2},
    "weights": {"zero": 2, "qat": "int4-weight-only"},
    "weights_zero1": {"zero": 1, "qat": "int4-weight-only"},
    "weights_zero0": {"zero": 0, "qat": "int4-weight-only"},
    "finer": {"zero": 2, "qat": "int4-weight-only", "qat_group": 16},
    "inputs": {"zero": 2, "qat": "int8-int4"},
    "checkpointed": {"zero": 2, "qat": "int8-int4", "gradient_checkpointing": True},
    "bf16": {"zero": 2, "qat": "int8-int4", "precision": "bf16"},
    "accumulated": {"zero": 2, "qat": "int4-weight-only", "micro_batch": 1, "grad_accum": 2},
    "saved": {"zero": 2, "qat": "int4-weight-only", "steps": 2, "save_at_end": True},
    "resumed": {"zero": 1, "qat": "int4-weight-only", "resumes": "saved"},
    "plain_resumed": {"zero": 2, "resumes": "saved"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    root = tmp_path_factory.mktemp("qat")
    made = {}
    for name, options in CASES.items():
        chosen = {"gpus": 2, "steps": STEPS, "tokenizer": "bytes", "learning_rate": 3e-3, **options}
        resumes = chosen.pop("resumes", None)
        made[name] = make_run(root / name, tiny_spec(**chosen))
        if resumes is not None:
            made[name].checkpoints_dir.rmdir()
            made[name].checkpoints_dir.symlink_to(root / resumes / "checkpoints")
    codes = run_matrix(list(made.values()))
    first = next(iter(made.values()))
    assert codes == [0, 0], log_end(first, 0) + log_end(first, 1)
    return made


def losses(run: RunDir) -> list[float]:
    return [event.loss for event in events_of(run, 0, StepFinished) if event.loss is not None]


@pytest.mark.slow
def test_rounding_is_in_the_loss_and_training_goes_on(runs: dict[str, RunDir]) -> None:
    first = {name: losses(run)[0] for name, run in runs.items() if "resume" not in name}
    assert len({first[name] for name in ("plain", "weights", "finer", "inputs")}) == 4
    assert all(abs(loss - first["plain"]) < 0.05 for loss in first.values())
    for name in ("weights", "finer", "inputs", "bf16", "accumulated"):
        told = losses(runs[name])
        assert len(told) == STEPS and told[-1] < told[0]


@pytest.mark.slow
def test_stages_and_recomputation_change_nothing(runs: dict[str, RunDir]) -> None:
    whole = losses(runs["weights"])
    for name in ("weights_zero1", "weights_zero0", "accumulated"):
        assert losses(runs[name]) == pytest.approx(whole, rel=2e-4)
    assert losses(runs["checkpointed"]) == pytest.approx(losses(runs["inputs"]), rel=2e-4)


@pytest.mark.slow
def test_a_checkpoint_is_like_any_other(runs: dict[str, RunDir]) -> None:
    assert events_of(runs["resumed"], 0, CheckpointLoaded)[0].step == 2
    assert losses(runs["resumed"]) == pytest.approx(losses(runs["weights"])[2:], rel=2e-4)
    # Without rounding, the same weights have another loss.
    assert losses(runs["plain_resumed"])[0] != losses(runs["resumed"])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "qat"), [("weights", "int4-weight-only"), ("bf16", "int8-int4"), ("plain", None)]
)
def test_what_rounds_is_told_by_the_modules(runs: dict[str, RunDir], name: str, qat: str | None) -> None:
    built = events_of(runs[name], 0, ModelBuilt)[0]
    assert built.qat == qat and built.rounding_layers == (LAYERS * MATRICES if qat else 0)
    assert "torchao" in built.versions
    spec = runs[name].spec()
    if qat:
        told = evidence.quantization(spec, read_state(runs[name]).ranks[0])
        assert told.on is True and told.words == f"14 layers rounding for {qat}"


def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from llmtop.trainer.worker.qat import prepare

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=8))
    with pytest.raises(LlmtopError, match="has no linear layers to round"):
        prepare(model, "int8-int4", 8)


def test_weights_and_names_stay_as_they_are(tmp_path: Path) -> None:
    import torch

    from llmtop.trainer.worker.build import build_model

    spec, rounding = tiny_spec(), tiny_spec(qat="int8-int4")
    plain, prepared = (build_model(one, {}, torch.device("cpu")) for one in (spec, rounding))
    assert plain.state_dict().keys() == prepared.state_dict().keys()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, prepared.state_dict()[name]), name
    names = {type(module).__name__ for module in prepared.modules()}
    assert "FakeQuantizedLinear" in names and type(prepared.lm_head) is torch.nn.Linear
