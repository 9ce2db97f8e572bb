"""What a launch would do, over the plan: the command, DeepSpeed's configuration; then yes or no."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from llmtop.profiler.memory.result import Prediction, is_short, short_words
from llmtop.tui.asking.changetext import needs_words
from llmtop.tui.keys import REVIEW_KEYS, bindings
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import harmless, wrapped
from llmtop.tui.widgets.sheet import Sheet

_INDENT = "  "


class LaunchReview(Sheet[bool]):
    """Ends with True where a person launches it. What is not predicted to fit takes another key."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(REVIEW_KEYS)

    def __init__(
        self,
        prediction: Prediction,
        command: str,
        config: str,
        notes: tuple[str, ...] = (),
        host_limit_bytes: int | None = None,
    ) -> None:
        self._short = is_short(prediction.host_bytes, host_limit_bytes)
        self._host_limit_bytes = host_limit_bytes
        self._fits = prediction.fits is not False and not self._short
        title = "Launch this run?" if self._fits else "This run is not predicted to fit"
        launch = "[@click=screen.launch]⏎" if self._fits else "[@click=screen.launch_anyway]y"
        super().__init__(title, keys=f"{launch} launches[/]   [@click=screen.dismiss]Esc goes back[/]")
        self._prediction = prediction
        self._command, self._config, self._notes = command, config, notes

    def text(self, width: int) -> Content:
        rows = [*self._verdict(width), Content(""), _title("the same from a shell")]
        rows += [Content(row) for row in wrapped(harmless(self._command), width, _INDENT)]
        rows += [Content(""), _title("DeepSpeed's configuration")]
        rows += [Content(f"{_INDENT}{harmless(row)}") for row in self._config.splitlines()]
        return Content("\n").join(rows)

    def _verdict(self, width: int) -> list[Content]:
        rows = [Content(row) for row in wrapped(needs_words(self._prediction), width)]
        if not self._fits:
            words = "It will most likely run out of memory; y launches it all the same."
            if self._short:
                short = short_words(self._prediction.host_bytes, self._host_limit_bytes)
                words = f"{short[:1].upper()}{short[1:]}. {words}"
            rows += [Content.styled(row, "bold $text-warning") for row in wrapped(words, width)]
        for note in self._notes:
            first, *more = wrapped(harmless(note), width - len("note "))
            rows.append(Content.assemble(("note ", "bold $text-warning"), first))
            rows += [Content(" " * len("note ") + row) for row in more]
        return rows

    def action_launch(self) -> None:
        if self._fits:
            self.dismiss(True)
        else:
            self.app.bell()

    def action_launch_anyway(self) -> None:
        if not self._fits:
            self.dismiss(True)


def _title(words: str) -> Content:
    return Content.styled(words, "bold $text-primary")
