"""A callback for transformers' Trainer, for whoever prefers a line of code to `llmtop run -- COMMAND`."""

from __future__ import annotations

from transformers import TrainerCallback

from llmtop.profiler.probes.attach import watch


class LlmtopCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the training of the Trainer that it is given to: `Trainer(..., callbacks=[LlmtopCallback()])`.

    To be made before `train()` is called, which makes engine and optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        watch()
