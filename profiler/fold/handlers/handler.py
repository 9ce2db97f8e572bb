"""What a handler of one kind of event is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmtop.profiler.fold.batch import Batch

Handler = Callable[[Batch, Any], None]
"""Folds one event of its kind into the batch."""
