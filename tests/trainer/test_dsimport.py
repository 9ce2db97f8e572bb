"""What DeepSpeed files are taken to mean, whatever their form."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import UsageError
from llmtop.trainer.dsimport.read import Imported, import_config
from tests.trainer.ds_causes import CAUSES
from tests.trainer.ds_parts import NVME, OFFLOAD, SMALL, adam, schedule, zero

# --- files --------------------------------------------------------------------------------------


def test_missing_file_names_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        import_config(tmp_path / "zero3.json")
    assert "zero2.json" in caught.value.fix


def test_folder_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UsageError, match="is a folder") as caught:
        import_config(tmp_path)
    assert "a.json" in caught.value.fix


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a regular file"):
        import_config(Path("/dev/null"))
    with pytest.raises(UsageError, match="larger than 4 MiB"):
        path = tmp_path / "big.json"
        path.write_text(" " * (5 << 20))
        import_config(path)
    with pytest.raises(UsageError):
        import_config(Path("a\0b.json"))


@pytest.mark.parametrize("text", ["[]", "null", '"zero"', "3", "true", "[1, 2"])
def test_what_is_not_an_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"ds\.json"):
        import_config(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "is empty"), (" \n\n", "is empty"), ("{}", "holds no key"), ("// {nothing}\n", "holds no key")],
)
def test_a_file_without_a_key(text: str, told: str, read: Any) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        read(text)
    assert caught.value.fix


def test_key_given_twice(read: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read('{"bf16": {"enabled": true},\n "bf16": {"enabled": false}}')
    assert "line 2" in caught.value.why
    assert "'bf16' is given twice" in caught.value.why


def test_broken_json_names_the_line(read: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read('{"zero_optimization": {"stage": 2},\n "fp16" {}}')
    assert "line 2" in caught.value.why


@pytest.mark.parametrize(
    "text", ["deepspeed_config:\n  zero_stage: 3\nmixed_precision: bf16\n", "---\nzero_stage: 3\n"]
)
def test_accelerates_yaml_is_recognised(text: str, read: Any) -> None:
    with pytest.raises(UsageError, match="YAML"):
        read(text)


def test_number_beyond_all_bounds(read: Any) -> None:
    with pytest.raises(UsageError, match="zero_optimization.reduce_bucket_size is too large"):
        read('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e999}}')


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [("utf-8", codecs.BOM_UTF8), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-32-be", codecs.BOM_UTF32_BE)],
)
def test_byte_order_marks_are_read_and_named(encoding: str, mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(mark + json.dumps(zero(1)).encode(encoding))
    imported = import_config(path)
    assert imported.values["zero"] == 1
    assert any(p.key == "file" and "byte order mark" in p.what for p in imported.problems)


def test_other_encodings_name_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{\n// caf\xe9\n"zero_optimization": {"stage": 1}}')
    imported = import_config(path)
    assert imported.values["zero"] == 1
    assert any("byte 0xe9 in line 2" in p.what for p in imported.problems)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        import_config(path)


def test_comments_work_in_deepspeed_only(read: Any) -> None:
    imported = read('{"zero_optimization": {"stage": 3}, // shard all\n "train_batch_size": "auto",}')
    assert imported.values["zero"] == 3
    said = next(p for p in imported.problems if p.key == "file")
    assert not said.fatal
    assert "transformers and accelerate do not" in said.what


@pytest.mark.parametrize("cause", CAUSES)
def test_cause(cause: str, read: Any) -> None:
    config, key, word, fatal = CAUSES[cause]
    imported: Imported = read(config)
    said = [p for p in imported.problems if p.key == key and word in f"{p.what} {p.fix}"]
    assert said, [str(p) for p in imported.problems]
    assert said[0].fatal == fatal
    assert imported.fatal == any(p.fatal for p in imported.problems)
    assert imported.fatal == fatal


# --- the options that a file means ----------------------------------------------------------------

MEANINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "stage": (zero(3), {"zero": 3}),
    "no zero": (SMALL, {"zero": 0}),
    "true": ({**SMALL, "zero_optimization": True}, {"zero": 1}),
    "false": ({**SMALL, "zero_optimization": False}, {"zero": 0}),
    "offload": (
        zero(3, offload_optimizer=OFFLOAD, offload_param=NVME),
        {"offload_optimizer": "cpu", "offload_param": "nvme", "nvme_path": "/drive"},
    ),
    "offload none": (zero(3, offload_param={"device": "none"}), {"offload_param": "none"}),
    "old offload": (
        zero(3, cpu_offload=True, cpu_offload_param=True),
        {"offload_optimizer": "cpu", "offload_param": "cpu"},
    ),
    "old offload off": (zero(cpu_offload=False), {"offload_optimizer": "none"}),
    "no effect at 2": (
        zero(offload_param=OFFLOAD, offload_optimizer=NVME),
        {"offload_param": "none", "offload_optimizer": "cpu"},
    ),
    "micro alone": (zero(), {"micro_batch": 2, "grad_accum": 1}),
    "micro and steps": ({**zero(), "gradient_accumulation_steps": 4}, {"micro_batch": 2, "grad_accum": 4}),
    "bf16": (zero(), {"precision": "bf16"}),
    "old bf16": ({"train_batch_size": 1, "bfloat16": {"enabled": True}}, {"precision": "bf16"}),
    "fp16": ({**SMALL, "bf16": {"enabled": False}, "fp16": {"enabled": True}}, {"precision": "fp16"}),
    "fp32": ({"train_batch_size": 8}, {"precision": "fp32"}),
    "clipping": ({**zero(), "gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
    "adam": (
        adam(lr=1e-4, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.1),
        {
            "learning_rate": 1e-4,
            "adam_beta1": 0.8,
            "adam_beta2": 0.99,
            "adam_epsilon": 1e-6,
            "weight_decay": 0.1,
        },
    ),
    "torch's adam": (adam(torch_adam=True), {"optimizer": "adamw_torch"}),
    "null is python's false": (adam(torch_adam=None), {}),
    "constant": (
        schedule("WarmupLR", warmup_max_lr=1e-4, warmup_num_steps=7),
        {"lr_schedule": "constant", "warmup_steps": 7, "learning_rate": 1e-4},
    ),
    "linear": (schedule("WarmupDecayLR", total_num_steps=50), {"lr_schedule": "linear", "steps": 50}),
    "cosine": (schedule("WarmupCosineLR", total_num_steps=50), {"lr_schedule": "cosine", "steps": 50}),
    "flat": (
        {
            "zero_stage": 3,
            "offload_param_device": "nvme",
            "offload_param_nvme_path": "/d",
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1,
        },
        {"zero": 3, "offload_param": "nvme", "nvme_path": "/d", "grad_accum": 4, "max_grad_norm": 1.0},
    ),
    "accelerate": (
        {
            "deepspeed_config": {"zero_stage": 1},
            "mixed_precision": "bf16",
            "num_processes": 16,
            "num_machines": 2,
        },
        {"zero": 1, "precision": "bf16", "gpus": 8, "nodes": 2},
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_meaning(name: str, read: Any) -> None:
    config, options = MEANINGS[name]
    imported = read(config)
    assert not imported.fatal, imported.problems
    assert {key: imported.values.get(key) for key in options} == options


def test_gradients_of_another_type_than_the_open_precision_are_told(read: Any) -> None:
    imported = read({"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "torch.float32"}})
    said = next(p for p in imported.problems if p.key == "data_types.grad_accum_dtype")
    assert not said.fatal
    assert "trains in fp32 too" in said.what and "--precision fp32" in said.fix


def test_what_no_option_says_stays_raw(read: Any) -> None:
    imported = read(
        {
            **zero(
                3,
                reduce_bucket_size="auto",
                max_live_parameters=2e8,
                overlap_comm=False,
                offload_optimizer={**NVME, "pin_memory": False},
                offload_param={"device": "none", "pin_memory": True},
            ),
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "fp16": {"enabled": False, "loss_scale": 0},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "bias_correction": True}},
            "steps_per_print": 10,
            "communication_data_type": "fp32",
            "tensorboard": {"enabled": False, "output_path": "x"},
            "wandb": {"enabled": True, "project": "p"},
        }
    )
    assert imported.values["deepspeed"] == {
        "zero_optimization": {
            "reduce_bucket_size": "auto",
            "stage3_max_live_parameters": 200000000,
            "overlap_comm": False,
            "offload_optimizer": {"pin_memory": False},
        },
        "bf16": {"check_grad_overflow": False},
        "fp16": {"loss_scale": 0},
        "optimizer": {"params": {"bias_correction": True}},
        "communication_data_type": "fp32",
        "wandb": {"enabled": True, "project": "p"},
    }


def test_second_nvme_folder_stays_raw(read: Any) -> None:
    imported = read(zero(3, offload_optimizer=NVME, offload_param={**NVME, "nvme_path": "/other"}))
    assert imported.values["nvme_path"] == "/drive"
    raw = imported.values["deepspeed"]["zero_optimization"]
    assert raw == {"offload_param": {"nvme_path": "/other"}}


# --- the batch triple ---------------------------------------------------------------------------


def triple(train: object = None, micro: object = None, steps: object = None) -> dict[str, Any]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {
        name: value for name, value in zip(names, (train, micro, steps), strict=True) if value is not None
    }
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, **given}


@pytest.mark.parametrize(
    ("config", "world_size", "options"),
    [
        (triple(32, 2, 2), 8, {"micro_batch": 2, "grad_accum": 2}),
        (triple(32, 2), 8, {"micro_batch": 2, "grad_accum": 2}),
        (triple(32, None, 2), 8, {"micro_batch": 2, "grad_accum": 2}),
        (triple(32), 8, {"micro_batch": 4, "grad_accum": 1}),
        (triple(8, None, 1), 4, {"micro_batch": 2, "grad_accum": 1}),
        (triple(8, 2, 1), None, {"micro_batch": 2, "grad_accum": 1}),
        (triple(8, None, 2), None, {"micro_batch": None, "grad_accum": 2}),
        (triple(8, 2), None, {"micro_batch": 2, "grad_accum": None}),
        (triple(8), None, {"micro_batch": None, "grad_accum": 1}),
        (triple(8, "auto", "auto"), 4, {"micro_batch": None, "grad_accum": None}),
        (triple(None, None, 4), None, {"micro_batch": None, "grad_accum": 4}),
    ],
)
def test_batch(config: Any, world_size: int | None, options: dict[str, Any], read: Any) -> None:
    imported = read(config, world_size=world_size)
    assert not imported.fatal, imported.problems
    assert {key: imported.values.get(key) for key in options} == options


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        (triple(256, 8, 1), 8),
        (triple(7, 2), 4),
        (triple(2), 4),
        (triple(9, None, 2), 4),
        (triple(7, 2, 2), None),
    ],
)
def test_batch_that_cannot_be(config: Any, world_size: int | None, read: Any) -> None:
    imported = read(config, world_size=world_size)
    assert imported.fatal
    assert any(p.fatal and p.key == "train_batch_size" for p in imported.problems)


def test_batch_that_fits_one_number_of_gpus_names_it(read: Any) -> None:
    imported = read(triple(256, 8, 1))
    assert not imported.fatal
    assert any("32 GPUs only" in p.what for p in imported.problems)
    assert any("1 GPU only" in p.what for p in read(triple(8, 8, 1)).problems)
