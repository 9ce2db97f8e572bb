"""DeepSpeed's compiled ops in words, by the names that its builders and their folders have."""

from __future__ import annotations

OP_WORDS: dict[str, str] = {
    "fused_adam": "fused Adam",
    "cpu_adam": "CPU Adam",
    "async_io": "asynchronous file access",
    "pin_memory": "pinned memory",
    "quantizer": "quantizer of ZeRO++",
}
