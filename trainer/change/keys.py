"""Which keys of a live run can be changed, and how: between two steps, by a relaunch, or not at all."""

from __future__ import annotations

from llmtop.presets.errors import UsageError, nearest

HOT = frozenset(
    {
        "micro_batch",
        "grad_accum",
        "seq_len",
        "learning_rate",
        "max_grad_norm",
        "gradient_checkpointing",
        "checkpointing_every",
        "checkpoint_every",
        "keep_checkpoints",
        "save_at_end",
        "classify_every",
        "sample_seconds",
        "hang_factor",
        "hang_floor_seconds",
    }
)
"""Changed between two steps, on all ranks at the same one."""

RESTAGE = frozenset(
    {
        "gpus",
        "zero",
        "offload_optimizer",
        "offload_param",
        "nvme_path",
        "attention",
        "liger",
        "liger_kernels",
        "checkpointing_reentrant",
        "optimizer",
        "quantization",
        "kernel_profile_step",
        "threads_per_rank",
        "heal",
        "deepspeed",
    }
)
"""The ranks save, end, and are started again."""

AFTER_END = frozenset({"steps"})
"""Fixed while a run lives; one that has ended can go on with another value."""

_OTHER_WEIGHTS = "another model than the one in training; start a run for it"
_OTHER_DATA = "the run's place in its data would mean nothing in other data; start a run for it"
_OTHER_SCHEDULE = "the steps that were made followed it; learning_rate scales it"
_IN_STATE = "it is part of the optimizer's saved state; start a run for it"
FIXED: dict[str, str] = {
    "model": _OTHER_WEIGHTS,
    "lora_rank": _OTHER_WEIGHTS,
    "lora_alpha": _OTHER_WEIGHTS,
    "lora_targets": _OTHER_WEIGHTS,
    "qat": "the weights in training are made for it; start a run for it, from the weights of this one",
    "qat_group": "the weights in training are made for it; start a run for it, from the weights of this one",
    "precision": "the weights in training are of this type; start a run for it",
    "gpu": "the run is on this machine's devices",
    "nodes": "a run keeps the hosts that it was launched on",
    "total_gpus": "a run keeps the hosts that it was launched on",
    "inter_node_gbps": "it says what the network is, for the prediction; plan with it",
    "steps": f"{_OTHER_SCHEDULE}, and llmtop resume RUN steps=N makes more once it has ended",
    "lr_schedule": _OTHER_SCHEDULE,
    "warmup_steps": _OTHER_SCHEDULE,
    "weight_decay": _IN_STATE,
    "adam_beta1": _IN_STATE,
    "adam_beta2": _IN_STATE,
    "adam_epsilon": _IN_STATE,
    "seed": _OTHER_DATA,
    "data": _OTHER_DATA,
    "text_field": _OTHER_DATA,
    "tokenizer": _OTHER_DATA,
    "deepspeed_config": "it is a file that was read at the launch; name the key in it: deepspeed.KEY=VALUE",
}
"""Key to why it stays."""
GPUS_OF_HOSTS = "a run keeps the hosts and slots that it was launched on; start one with other slots"


def check_key(key: str, where: str, *, ended: bool = False) -> None:
    """Raise UsageError for a key that a live run, or one that has `ended`, cannot change.

    For an unknown one the nearest of all keys is named.
    """
    if key in HOT or key in RESTAGE or (ended and key in AFTER_END):
        return
    if key in FIXED:
        whose = "a run that is resumed" if ended else "a live run"
        raise UsageError(f"{where}: {key} of {whose} cannot be changed", why=FIXED[key])
    # Also among those that stay: `step` is steps, and what is then said of it helps.
    guess = nearest(key, HOT | RESTAGE | FIXED.keys())
    known = f"between two steps: {', '.join(sorted(HOT))}; by a relaunch: {', '.join(sorted(RESTAGE))}"
    raise UsageError(f"{where}: unknown key '{key}'", fix=f"did you mean '{guess}'?" if guess else known)
