"""What a run reads, as rows: its weights, its data, its tokenizer."""

from __future__ import annotations

from textual.content import Content

from llmtop.presets.inputs import inputs
from llmtop.presets.spec import RunSpec
from llmtop.tui.widgets.paint import fit, harmless


def input_rows(spec: RunSpec, label_cells: int = 10, tokenizer: str = "tokenizer") -> list[Content]:
    """A row each, the most telling first; `tokenizer` is the word for a narrower label."""
    found = inputs(spec)
    return [
        Content.assemble((fit(label, label_cells), "$muted"), harmless(text))
        for label, text in (("weights", found.weights), ("data", found.data), (tokenizer, found.tokenizer))
    ]
