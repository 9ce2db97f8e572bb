"""The DeepSpeed configuration that a run gets, and that DeepSpeed takes it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.trainer.dsconfig import deepspeed_config
from tests.recorded_spec import recorded_spec
from tests.trainer.real_deepspeed import refusal_of

OFFLOADS = [("none", "none"), ("cpu", "none"), ("nvme", "none"), ("cpu", "cpu"), ("nvme", "nvme")]


def gpu_spec(ranks: int = 1, **options: Any) -> RunSpec:
    return recorded_spec("cuda", ranks=ranks, **options)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_takes_every_combination(zero: int, precision: str, optimizer: str) -> None:
    for kind, (offload_optimizer, offload_param) in itertools.product(("cpu", "cuda"), OFFLOADS):
        spec = recorded_spec(
            kind,  # type: ignore[arg-type]
            ranks=1,
            zero=zero,
            precision=precision,
            optimizer=optimizer,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            nvme_path="/drive",
            micro_batch=3,
            grad_accum=4,
        )
        assert refusal_of(deepspeed_config(spec)) is None


def test_batch_triple_is_consistent() -> None:
    config = deepspeed_config(gpu_spec(8, micro_batch=2, grad_accum=4, nodes=2))
    assert config["train_batch_size"] == 8 * 2 * 2 * 4
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4


def test_nothing_slows_or_prints_unasked() -> None:
    config = deepspeed_config(gpu_spec(max_grad_norm=0.0))
    assert config["gradient_clipping"] == 0.0
    assert config["timers"] == {"throughput": {"enabled": False}}
    assert config["wall_clock_breakdown"] is False
    assert config["steps_per_print"] > 1e8
    assert "comms_logger" not in config
    assert "scheduler" not in config


def test_optimizer_by_machine_and_choice() -> None:
    on_gpu = deepspeed_config(gpu_spec(learning_rate=1e-4, weight_decay=0.1))["optimizer"]
    assert on_gpu["type"] == "AdamW"
    assert on_gpu["params"] == {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert deepspeed_config(recorded_spec("cpu"))["optimizer"]["params"]["torch_adam"] is True
    torch_adam = deepspeed_config(gpu_spec(optimizer="adamw_torch", offload_optimizer="cpu"))
    assert torch_adam["optimizer"]["params"]["torch_adam"] is True
    for name in ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"):
        client = deepspeed_config(gpu_spec(optimizer=name))
        assert "optimizer" not in client
        assert client["zero_allow_untested_optimizer"] is True


def test_pinning_serves_a_gpu_only() -> None:
    def pinned(spec: RunSpec) -> object:
        return deepspeed_config(spec)["zero_optimization"]["offload_optimizer"]["pin_memory"]

    assert pinned(gpu_spec(offload_optimizer="cpu")) is True
    assert pinned(recorded_spec("cpu", offload_optimizer="cpu")) is False
    raw = {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}}
    assert pinned(gpu_spec(offload_optimizer="cpu", deepspeed=raw)) is False


def test_nvme_has_its_folder_and_its_reader() -> None:
    config = deepspeed_config(gpu_spec(zero=3, offload_param="nvme", nvme_path="/drive"))
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == "/drive"
    assert config["aio"]["block_size"] == 1 << 20
    with pytest.raises(UsageError, match="needs a folder") as caught:
        deepspeed_config(gpu_spec(zero=3, offload_param="nvme"))
    assert "--nvme-path" in caught.value.fix


def test_raw_keys_win_over_generated_ones() -> None:
    raw = {
        "zero_optimization": {"reduce_bucket_size": 2e8, "max_live_parameters": 1e8, "overlap_comm": "true"},
        "wall_clock_breakdown": True,
        "bf16": {"check_grad_overflow": False},
        "optimizer": {"params": {"bias_correction": False}},
        "timers": {"throughput": {"synchronized": False}},
    }
    config = deepspeed_config(gpu_spec(zero=3, deepspeed=raw))
    assert config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 200_000_000,
        "stage3_max_live_parameters": 100_000_000,
        "overlap_comm": True,
    }
    assert config["wall_clock_breakdown"] is True
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert config["optimizer"]["params"]["bias_correction"] is False
    assert config["timers"]["throughput"] == {"enabled": False, "synchronized": False}
    assert refusal_of(config) is None


@pytest.mark.parametrize(("word", "said"), [("No", False), ("f", False), ("OFF", False), ("yes", True)])
def test_a_text_in_a_switch_is_handed_over_as_what_it_says(word: str, said: bool) -> None:
    """Also where DeepSpeed takes any text for true."""
    block = {"enabled": word, "seed": 3}
    raw = {"optimizer": {"params": {"torch_adam": word, "amsgrad": word}}, "dataloader_drop_last": word}
    config = deepspeed_config(
        gpu_spec(deepspeed={**raw, "autotuning": {"enabled": word, "fast": True}, "data_efficiency": block})
    )
    params = config["optimizer"]["params"]
    assert (params["torch_adam"], params["amsgrad"], config["dataloader_drop_last"]) == (said, said, said)
    assert config["autotuning"] == {"enabled": said, "fast": True}
    assert config["data_efficiency"] == {"enabled": said, "seed": 3}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_settings_of_fp16_and_of_communication_pass_through(zero: int) -> None:
    scaling = {"initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    block = {"overlap_comm": True, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 2_000_000}
    raw = {"fp16": scaling, "communication_data_type": "fp32", "zero_optimization": block}
    config = deepspeed_config(gpu_spec(zero=zero, precision="fp16", deepspeed=raw))
    assert config["fp16"] == {"enabled": True, **scaling}
    assert config["communication_data_type"] == "fp32"
    assert config["zero_optimization"] == {"stage": zero, **block}
    assert refusal_of(config) is None
    static = deepspeed_config(
        gpu_spec(zero=zero, precision="fp16", deepspeed={"fp16": {"loss_scale": 128.0}})
    )
    assert static["fp16"] == {"enabled": True, "loss_scale": 128.0}


def test_zero_plus_plus_passes_through() -> None:
    block = {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    }
    config = deepspeed_config(gpu_spec(ranks=2, zero=3, deepspeed={"zero_optimization": block}))
    assert config["zero_optimization"] == {"stage": 3, **block}


def test_auto_is_filled_as_transformers_does() -> None:
    raw = {
        "zero_optimization": {
            "reduce_bucket_size": "auto",
            "prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "overlap_comm": "auto",
        },
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "steps_per_print": "auto",
        "optimizer": {"params": {"lr": "auto", "betas": "auto", "bias_correction": "auto"}},
    }
    config = deepspeed_config(gpu_spec(zero=3, deepspeed=raw))
    hidden = 4096
    assert config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": hidden**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    assert "auto" not in str(config)
    assert refusal_of(config) is None


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"train_batch_size": 7}, "--micro-batch, --grad-accum and --gpus"),
        ({"zero_optimization": {"stage": 3}}, "--zero"),
        ({"zero_optimization": True}, "--zero"),
        ({"zero_optimization": {"cpu_offload": True}}, "--offload-optimizer"),
        ({"fp16": {"enabled": True}}, "--precision"),
        ({"gradient_clipping": 0.5}, "--max-grad-norm"),
        ({"optimizer": {"params": {"lr": 1.0}}}, "--learning-rate"),
    ],
)
def test_raw_keys_that_contradict_an_option(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match="contradicts") as caught:
        deepspeed_config(gpu_spec(deepspeed=raw))
    assert caught.value.fix.startswith(f"set {named} ")


def test_raw_keys_that_repeat_an_option_are_fine() -> None:
    raw = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1}
    assert refusal_of(deepspeed_config(gpu_spec(deepspeed=raw))) is None


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"zero_optimization": {"reduce_buket_size": 1}}, "zero_optimization.reduce_buket_size"),
        ({"gradient_cliping": 1}, "gradient_cliping"),
        ({"zero_optimization": {"reduce_bucket_size": "large"}}, "zero_optimization.reduce_bucket_size"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type"),
        ({"elasticity": {}}, "elasticity"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"zenflow": {}}}, None),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
    ],
)
def test_raw_keys_that_cannot_work(raw: dict[str, Any], key: str | None) -> None:
    if key is None:
        assert deepspeed_config(gpu_spec(deepspeed=raw))
        return
    with pytest.raises(UsageError, match=rf"^deepspeed\.{key}"):
        deepspeed_config(gpu_spec(deepspeed=raw))


def test_spec_is_left_alone() -> None:
    raw = {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}
    spec = gpu_spec(offload_optimizer="cpu", deepspeed=raw)
    deepspeed_config(spec)["zero_optimization"]["offload_optimizer"]["pin_memory"] = "changed"
    assert spec.options.deepspeed == {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}
