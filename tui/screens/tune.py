"""The search for the fastest setting of a plan: live, from its folder, and the winner back into the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from msgspec import Struct
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import Change
from llmtop.profiler.units import counted
from llmtop.trainer.tune.journal import Asked, TuneDir
from llmtop.trainer.tune.judged import judged
from llmtop.trainer.tune.lacking import lacking
from llmtop.trainer.tune.pool import tried_of
from llmtop.trainer.tune.rank import ranked
from llmtop.trainer.tune.space import Candidate, Space, choice_of
from llmtop.trainer.tune.state import SearchState, TuneReader
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.feeds.feed import Replaceable
from llmtop.tui.feeds.searching import last_words, search_for
from llmtop.tui.keys import MOVE_KEYS, TUNE_KEYS, bindings
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import fit, harmless, wrapped
from llmtop.tui.widgets.tunerows import OWN, TuneRow, head, painted, rows_of, summary, table_of

_POLL_SECONDS = 0.5
_LEAST_CELLS = 20


class SpaceJudged(Message):
    """All settings around the plan are judged; or the words why none can be."""

    def __init__(self, space: Space | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.space = space
        self.error = error


class Seen(Struct, frozen=True, kw_only=True):
    """A search as it was read."""

    tune: TuneDir | None
    state: SearchState
    following: tuple[Candidate, ...]
    """What was not tried, the most promising first."""
    said: str = ""
    """Why it ended without a trial, as far as it said so."""


class SearchSeen(Replaceable):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen


class SearchAsked(Message):
    """A search was begun or asked to end, or could not be."""

    def __init__(self, words: str, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.words = words
        self.error = error


class TuneScreen(ModalScreen[Change | None]):
    """Ends with the change that was taken, or None. What it shows is the search's folder alone."""

    HELP_TITLE: ClassVar[str] = "Tune"
    BINDINGS: ClassVar[list[BindingType]] = bindings((*TUNE_KEYS, *MOVE_KEYS))

    def __init__(self, spec: RunSpec, root: Path, deeds: Deeds) -> None:
        super().__init__()
        self._spec = spec
        self._root = root
        self._deeds = deeds
        self._space: Space | None = None
        self._rows: list[TuneRow] = []
        self._tune: TuneDir | None = None
        """The search that is shown; set by whoever begins one, read by the thread that follows it."""
        self._changed = threading.Event()
        self.seen: Seen | None = None

    @property
    def settled(self) -> bool:
        """Whether there is a search, or the ranking alone, to show."""
        return self.seen is not None

    def compose(self) -> ComposeResult:
        title = f"  tune  {harmless(self._spec.model.name)}"
        yield Static(Content.assemble(("llmtop", "bold $text-primary"), title), id="search-head")
        yield Static("judging every setting", id="tune-top", markup=False)
        yield OptionList(id="tune-rows", markup=False)
        yield Static("", id="tune-notes", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._follow()

    def on_unmount(self) -> None:
        self._changed.set()

    # --- reading ---------------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="tune")
    def _follow(self) -> None:
        """Judge the settings once, then read the search's folder for as long as the screen is there."""
        worker = get_current_worker()
        self._tune = search_for(self._spec, self._root)
        try:
            space = _judged(self._spec, self._tune)
        except LlmtopError as error:
            self.post_message(SpaceJudged(None, error))
            return
        self.post_message(SpaceJudged(space))
        reader: TuneReader | None = None
        shown: TuneDir | None = None
        before: SearchState | None = None
        while not worker.is_cancelled:
            if self._tune is not shown:
                shown, before = self._tune, None
                reader = TuneReader(shown) if shown is not None else None
            state = reader.poll() if reader is not None else SearchState()
            if state != before:
                self.post_message(SearchSeen(_seen(shown, state, space)))
                before = state
            self._changed.wait(_POLL_SECONDS)
            self._changed.clear()

    def on_space_judged(self, message: SpaceJudged) -> None:
        self._space = message.space
        if message.error is not None:
            self.seen = Seen(tune=None, state=SearchState(), following=())
            self.query_one("#tune-top", Static).update(harmless(str(message.error)))

    def on_search_seen(self, message: SearchSeen) -> None:
        self.seen = message.seen
        self._show()

    def on_resize(self) -> None:
        self._show()

    # --- showing ---------------------------------------------------------------------------------

    def _show(self) -> None:
        seen, space = self.seen, self._space
        if seen is None or space is None:
            return
        width = max(_LEAST_CELLS, self.size.width - 2)
        start = choice_of(self._spec, space.knobs)
        self._rows = rows_of(seen.state, space, seen.following, start)
        top = [row for text in summary(seen.state, space, start) for row in wrapped(text, width)]
        table = table_of(self._rows, start, width - 1)
        top += wrapped(f"all with {table.same}", width) if table.same else []
        title = Content.styled(fit(head(table), width - 1).rstrip(), "$muted")
        top_text = Content("\n").join([*map(Content, top), title])
        self.query_one("#tune-top", Static).update(top_text)
        listed = self.query_one(OptionList)
        at = listed.highlighted
        listed.clear_options()
        listed.add_options([Option(painted(row, table)) for row in self._rows])
        listed.highlighted = min(at or 0, len(self._rows) - 1) if self._rows else None
        told = [f"* {OWN}"] if any(row.own for row in self._rows) else []
        notes = [row for text in (*told, *_notes(seen)) for row in wrapped(harmless(text), width)]
        self.query_one("#tune-notes", Static).update(Content.styled("\n".join(notes), "$muted"))

    # --- keys ------------------------------------------------------------------------------------

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_take()

    def action_take(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is None or at >= len(self._rows):
            self._say("There is nothing to take.")
            return
        row = self._rows[at]
        if row.kind == "failed":
            self._say("It failed: there is nothing to take.")
            return
        self.dismiss(dict(row.change))

    def action_search(self) -> None:
        if self.seen is None or self._space is None:
            self._say("The settings are still being judged.")
        elif self.seen.state.going:
            self._say("The search goes on already.")
        elif not self._space.candidates:
            self._say("There is nothing to try.")
        else:
            self._begin(self._tune)

    def action_interrupt(self) -> None:
        if self.seen is None or self._tune is None or not self.seen.state.going:
            self._say("No search goes on.")
        else:
            self._end(self._tune)

    @work(thread=True, exclusive=True, group="deed")
    def _begin(self, tune: TuneDir | None) -> None:
        def begin() -> str:
            self._tune = self._deeds.search(self._spec, tune, self._root)
            self._changed.set()
            return f"search {self._tune.tune_id} begins; it goes on without llmtop"

        self._do(begin)

    @work(thread=True, exclusive=True, group="deed")
    def _end(self, tune: TuneDir) -> None:
        self._do(lambda: "it ends with its trial" if self._deeds.interrupt(tune) else "it had ended")

    def _do(self, deed: Callable[[], str]) -> None:
        try:
            self.post_message(SearchAsked(deed()))
        except LlmtopError as error:
            self.post_message(SearchAsked("", error))

    def on_search_asked(self, message: SearchAsked) -> None:
        self._say(str(message.error) if message.error is not None else message.words)

    def _say(self, text: str) -> None:
        self.app.clear_notifications()
        words = "\n".join(harmless(line) for line in text.splitlines())
        self.notify(words, timeout=5, markup=False)


def _judged(spec: RunSpec, tune: TuneDir | None) -> Space:
    """What varies as the search has it; by default everything that usually does."""
    asked = tune.asked() if tune is not None else Asked(spec=spec)
    # Where nothing could run, as on a laptop, the predictions are still worth looking at.
    return judged(asked, here=not lacking()(spec))


def _seen(tune: TuneDir | None, state: SearchState, space: Space) -> Seen:
    following = tuple(ranked(space.candidates, tried_of(state.ended, space)))
    silent = tune is not None and not state.going and not state.ended
    return Seen(
        tune=tune,
        state=state,
        following=following,
        said=last_words(tune) if tune is not None and silent else "",
    )


def _notes(seen: Seen) -> list[str]:
    state, tune = seen.state, seen.tune
    if tune is None:
        return [
            "s begins the search: real trials of a few steps each, five minutes and twelve trials at most"
        ]
    count = counted(len(state.ended), "trial")
    if state.going:
        return [f"search {tune.tune_id} goes on, {count} so far; x ends it"]
    if seen.said:
        return [f"search {tune.tune_id} ended: {seen.said}"]
    return [f"search {tune.tune_id}: {count}; s goes on; llmtop tune --resume {tune.tune_id} does the same"]
