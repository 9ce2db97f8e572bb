"""The runs that show what each technique buys: series by name, the ladder of techniques, the lengths."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.rows import Cell

STEPS = 8

ALL = "ZeRO-3, all of these"
OPTIMIZER_AWAY = "ZeRO-3, all of these, optimizer on the CPU"
_FULL: Cell = {"attention": "flash_attention_2", "liger": True, "gradient_checkpointing": True}
LADDER: dict[str, Cell] = {
    "naive: fp32, eager attention, no ZeRO": {
        "zero": 0,
        "precision": "fp32",
        "attention": "eager",
        "optimizer": "adamw_torch",
    },
    "bf16": {"zero": 0, "attention": "eager"},
    "ZeRO-1": {"zero": 1, "attention": "eager"},
    "ZeRO-2": {"zero": 2, "attention": "eager"},
    "ZeRO-3": {"zero": 3, "attention": "eager"},
    "ZeRO-2, FlashAttention-2": {"zero": 2, "attention": "flash_attention_2"},
    "ZeRO-2, FlashAttention-2, Liger": {"zero": 2, "attention": "flash_attention_2", "liger": True},
    "ZeRO-2, FlashAttention-2, Liger, checkpointing": {"zero": 2, **_FULL},
    ALL: {"zero": 3, **_FULL},
    OPTIMIZER_AWAY: {"zero": 3, **_FULL, "offload_optimizer": "cpu"},
    "ZeRO-3, all of these, optimizer and weights on the CPU": {
        "zero": 3,
        **_FULL,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
}
"""In the order of the table."""
LENGTHS = (2048, 8192, 16384, 32768)
LADDER_MODEL = "llama-3.2-1b"
LONGEST_EAGER = 8192
"""Beyond this the scores of eager attention alone are more than any GPU has."""
ATTENTION_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
EAGER, FLASH = "eager attention", "FlashAttention-2"
LIGER_OFF, LIGER_ON = "without Liger", "with Liger"
RESIDENT, OFFLOADED = "on the GPU", "offloaded to the CPU"
LARGE = "8B at 16k"

_CPU_LADDER: dict[str, Cell] = {
    "naive": {"zero": 0, "attention": "eager"},
    "ZeRO-2": {"zero": 2, "attention": "eager"},
    "ZeRO-2, checkpointing": {"zero": 2, "attention": "eager", "gradient_checkpointing": True},
}


def cells(gpus: int) -> Iterator[Cell]:
    """Everything that the document speaks of, what its claims rest on first. `series` and `name` are ours."""
    for length in ATTENTION_LENGTHS:
        for name, attention in ((EAGER, "eager"), (FLASH, "flash_attention_2")):
            if attention == "eager" and length > LONGEST_EAGER:
                continue
            options: Cell = {"model": LADDER_MODEL, "zero": 2, "attention": attention, "seq_len": length}
            yield _cell("attention", name, gpus, options)
    for name, liger in ((LIGER_OFF, False), (LIGER_ON, True)):
        vocabulary: Cell = {"model": "llama-3.2-1b", "zero": 2, "micro_batch": 8, "seq_len": 2048}
        yield _cell("liger", name, gpus, {**vocabulary, "attention": "flash_attention_2", "liger": liger})
    resident: Cell = {"model": "llama-3.2-3b", "zero": 3, "seq_len": 4096, **_FULL}
    yield _cell("offload", RESIDENT, gpus, resident)
    yield _cell("offload", OFFLOADED, gpus, {**resident, "offload_optimizer": "cpu", "offload_param": "cpu"})
    optimizer = "adamw_8bit" if gpus == 1 else "adamw"
    large: Cell = {"model": "llama-3.1-8b", "zero": 3, "seq_len": 16384, "optimizer": optimizer, **_FULL}
    yield _cell("large", LARGE, gpus, large)
    for length in LENGTHS:
        for name, options in LADDER.items():
            yield _cell("ladder", name, gpus, {"model": LADDER_MODEL, "seq_len": length, **options})


def cpu_cells() -> Iterator[Cell]:
    """The same script on a machine without a GPU."""
    for length in (32, 128):
        for name, options in _CPU_LADDER.items():
            small: Cell = {"model": "tiny-llama-cpu", "seq_len": length, "threads_per_rank": 1}
            yield _cell("ladder", name, 1, {**small, **options})


def _cell(series: str, name: str, gpus: int, options: Cell) -> Cell:
    return {"series": series, "name": name, "gpus": gpus, "micro_batch": 1, "steps": STEPS, **options}
