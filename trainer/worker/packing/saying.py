"""What a job tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable

from llmtop.trainer.quantize.job import Answer

Say = Callable[[Answer], None]
