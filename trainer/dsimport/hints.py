"""Where a key belongs that stands in the wrong place: misspellings, other blocks, other programs' names."""

from __future__ import annotations

from llmtop.presets.errors import nearest
from llmtop.trainer.dsimport.keys import BLOCKS

ADVICE: dict[str, str] = {
    "per_device_train_batch_size": "DeepSpeed's name for it is train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "DeepSpeed's name for it is train_micro_batch_size_per_gpu",
    "micro_batch_size": "DeepSpeed's name for it is train_micro_batch_size_per_gpu",
    "batch_size": "DeepSpeed's names are train_batch_size and train_micro_batch_size_per_gpu",
    "max_grad_norm": "DeepSpeed's name for it is gradient_clipping, at top level",
    "learning_rate": "write it as optimizer.params.lr",
    "lr": "write it as optimizer.params.lr",
    "betas": "write it as optimizer.params.betas",
    "eps": "write it as optimizer.params.eps",
    "weight_decay": "write it as optimizer.params.weight_decay",
    "warmup_steps": "write it as scheduler.params.warmup_num_steps",
    "mixed_precision": 'write it as "bf16": {"enabled": true} or "fp16": {"enabled": true}',
    "precision": 'write it as "bf16": {"enabled": true} or "fp16": {"enabled": true}',
    "zero_stage": "write it as zero_optimization.stage",
    "offload_optimizer_device": "write it as zero_optimization.offload_optimizer.device",
    "offload_param_device": "write it as zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "write it as zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "write it as zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "write it as zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero3_init_flag": "delete it: it belongs in accelerate's own YAML",
    "dist_init_required": "delete it: it is an argument of deepspeed.initialize()",
    "comms_config": "DeepSpeed's name for it is comms_logger",
    "monitor_config": "delete it; DeepSpeed's own blocks are tensorboard, wandb, csv_monitor and comet",
    "gradient_checkpointing": "turn it on where the model is built (llmtop's gradient_checkpointing)",
    "flash_attention": "choose it where the model is built (llmtop's attention)",
    "compile.backend": "delete it; the backend is now an argument of engine.compile()",
    "compile.disable": "delete it; compilation now happens only where engine.compile() is called",
    "compile.enabled": "delete it; compilation now happens only where engine.compile() is called",
    "compile.kwargs": "delete it; these are now arguments of engine.compile()",
}
"""Key, or dotted path of a key, to what to do about it."""


def hint(block: str, key: str) -> str:
    """What to do about a key that the block does not have."""
    if is_remark(key):
        return "delete it; DeepSpeed reads // comments, but takes every key here for a setting"
    if key.strip() != key and (key.strip() in BLOCKS[block].keys or block == ""):
        return f"write '{key.strip()}' without the blank"
    if advice := ADVICE.get(f"{block}.{key}") or ADVICE.get(key):
        return advice
    homes = homes_of(key)
    if homes:
        return f"move it to {' or '.join(homes)}"
    guess = nearest(key, spellings(block))
    return f"did you mean '{guess}'?" if guess else "delete it"


def is_remark(key: str) -> bool:
    """Whether the key is somebody's way of writing a comment into JSON."""
    return key.strip().lower().startswith(("_", "/", "#", "comment"))


def homes_of(key: str) -> list[str]:
    """The blocks that have the key, the root as `top level`."""
    found = [path or "top level" for path in BLOCKS if key in spellings(path)]
    return found if len(found) <= 3 else []


def spellings(block: str) -> set[str]:
    """Every name that the block reads."""
    known = BLOCKS[block]
    return set(known.keys) | {f"stage3_{name}" for name in known.prefixed}
