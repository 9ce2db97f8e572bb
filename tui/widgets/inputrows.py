"""What a run reads, as rows: its weights, its data, its tokenizer."""

from __future__ import annotations

from llmtop.presets.inputs import brief_inputs, inputs
from llmtop.presets.spec import RunSpec
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import fit, harmless, wrapped


def input_rows(
    spec: RunSpec,
    label_cells: int = 10,
    tokenizer: str = "tokenizer",
    *,
    brief: bool = False,
    width: int | None = None,
) -> list[Content]:
    """A row each, the most telling first; `tokenizer` is the word for a narrower label.

    `brief` leaves out what else there could be; for a `width` what is longer has several rows.
    """
    found = brief_inputs(spec) if brief else inputs(spec)
    rows: list[Content] = []
    for label, text in (("weights", found.weights), ("data", found.data), (tokenizer, found.tokenizer)):
        shown = harmless(text)
        first, *more = wrapped(shown, width - label_cells) if width is not None else [shown]
        rows.append(Content.assemble((fit(label, label_cells), "$muted"), first))
        rows += [Content(" " * label_cells + row) for row in more]
    return rows
