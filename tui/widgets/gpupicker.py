"""The GPUs of this machine over the plan: who uses which and how much, and which ones the run is to have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from llmtop.profiler.hardware.gpuuse import GpuProcess, GpusInUse, GpuUse
from llmtop.profiler.units import counted, format_bytes, format_percent
from llmtop.tui.keys import MOVE_KEYS, PICKER_KEYS, bindings
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import NOT_KNOWN, fit, fit_right, gauge, harmless, used_of, wrapped

EVERY_SECONDS = 2.0
_MOST_PROCESSES = 4
_FREE_SHARE = 0.02
"""Of its memory: a driver keeps some for itself on a device that nobody uses."""
_MARK_CELLS, _NUMBER_CELLS, _LEAST_BAR_CELLS = 10, 26, 8
_USER_CELLS, _SIZE_CELLS = 12, 10
_LEAST_CELLS = 20


def is_free(gpu: GpuUse) -> bool:
    """Nobody has memory of it, as far as the driver tells."""
    if gpu.processes:
        return False
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return gpu.processes is not None if used is None or not total else used < _FREE_SHARE * total


class GpusRead(Message):
    def __init__(self, found: GpusInUse) -> None:
        super().__init__()
        self.found = found


class PickList(OptionList):
    """Enter takes all that are marked, and not the row under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "screen.take", "Take them", key_display="⏎")]


class GpuPicker(ModalScreen[tuple[GpuUse, ...]]):
    """Ends with the chosen GPUs, or with None. It reads them again while it is open."""

    HELP_TITLE: ClassVar[str] = "GPUs of this machine"
    BINDINGS: ClassVar[list[BindingType]] = bindings((*PICKER_KEYS, *MOVE_KEYS))

    def __init__(
        self, read: Callable[[], GpusInUse], chosen: tuple[int, ...], need_bytes: int | None = None
    ) -> None:
        super().__init__()
        self._read = read
        self._chosen = set(chosen)
        self._need_bytes = need_bytes
        """What the plan needs of each, at most."""
        self.found: GpusInUse | None = None
        self._looks = False
        """Whether a reading is under way: a driver that hangs is not asked again by every tick."""

    def compose(self) -> ComposeResult:
        yield Static(id="search-head", markup=False)
        yield PickList(id="gpu-rows", markup=False)
        yield Static("", id="gpu-notes", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._look()
        self.set_interval(EVERY_SECONDS, self._look)

    def _look(self) -> None:
        if not self._looks:
            self._looks = True
            self._ask()

    @work(thread=True, group="gpus")
    def _ask(self) -> None:
        self.post_message(GpusRead(self._read()))

    def on_gpus_read(self, message: GpusRead) -> None:
        self._looks = False
        if message.found != self.found:
            self.found = message.found
            self._paint()

    def on_resize(self) -> None:
        self._paint()

    @property
    def settled(self) -> bool:
        return self.found is not None

    def _paint(self) -> None:
        if self.found is None:
            return
        width, gpus = max(_LEAST_CELLS, self.size.width - 3), self.found.gpus
        words = f"  GPUs of this machine  {len(self._chosen)} chosen" if gpus else "  GPUs of this machine"
        head = Content.assemble(("llmtop", "bold $text-primary"), words)
        self.query_one("#search-head", Static).update(head)
        listed = self.query_one(OptionList)
        at = listed.highlighted
        options = [Option(self._row(gpu, width), id=str(gpu.index), disabled=not gpu.visible) for gpu in gpus]
        listed.set_options(options)
        free = [number for number, gpu in enumerate(gpus) if gpu.visible]
        listed.highlighted = at if at is not None and at < len(gpus) else free[0] if free else None
        notes = wrapped(self._notes(), width)
        self.query_one("#gpu-notes", Static).update(Content.styled("\n".join(notes), "$muted"))

    def _notes(self) -> str:
        if self.found is None or not self.found.gpus:
            why = self.found.problem if self.found is not None else ""
            why = f" ({harmless(why)})" if why else ""
            none = "no GPU answers" if self.found is not None and self.found.is_silent else "no GPU here"
            return f"{NOT_KNOWN}: {none}{why}. In the plan the row gpu takes any kind."
        need = self._need_bytes
        adds = f", ━ what the plan needs of a chosen one, {format_bytes(need)} at most" if need else ""
        return f"╍ in use now{adds}. A run is given the chosen ones by CUDA_VISIBLE_DEVICES."

    def _row(self, gpu: GpuUse, width: int) -> Content:
        is_chosen = gpu.index in self._chosen
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        head = Content.assemble(
            ("✓ " if is_chosen else "· ", "bold $accent" if is_chosen else "$muted"),
            (fit(f"GPU{gpu.index}", _MARK_CELLS - 2), "bold" if is_chosen else ""),
        )
        active = (
            "n/a" if gpu.utilization_percent is None else format_percent(gpu.utilization_percent, digits=0)
        )
        numbers = fit_right(f"{used_of(used, total)}  busy {active}", _NUMBER_CELLS)
        room = max(_LEAST_BAR_CELLS, width - _MARK_CELLS - _NUMBER_CELLS - 1)
        added = self._need_bytes if is_chosen and self._need_bytes else 0
        if used is None or not total:
            bar = gauge(None, room)
        else:
            bar = gauge(added / total, room, others=used / total)
        rows = [Content.assemble(head, bar, " ", numbers)]
        rows += [Content.styled(_indented(row), "$muted") for row in self._told(gpu, width - _MARK_CELLS)]
        return Content("\n").join(rows)

    def _told(self, gpu: GpuUse, width: int) -> Iterator[str]:
        name = harmless(gpu.name or "")
        if not gpu.visible:
            yield fit(f"{name}  hidden by CUDA_VISIBLE_DEVICES of this shell", width).rstrip()
        if gpu.processes is None:
            yield fit(f"{name}  who uses it: {NOT_KNOWN}", width).rstrip()
            return
        if not gpu.processes:
            yield fit(f"{name}  {'nobody uses it' if is_free(gpu) else 'no process is told'}", width).rstrip()
            return
        yield fit(name, width).rstrip()
        for process in gpu.processes[:_MOST_PROCESSES]:
            yield _process_row(process, width)
        if len(gpu.processes) > _MOST_PROCESSES:
            yield f"and {counted(len(gpu.processes) - _MOST_PROCESSES, 'process', 'processes')} more"

    # --- keys ----------------------------------------------------------------------------------

    def action_pick(self) -> None:
        option = self.query_one(OptionList).highlighted_option
        if option is not None and option.id is not None:
            self._chosen ^= {int(option.id)}
            self._paint()

    def action_free(self) -> None:
        """All that nobody uses, of the kind of the first."""
        gpus = [gpu for gpu in self.found.gpus if gpu.visible and is_free(gpu)] if self.found else []
        self._chosen = {gpu.index for gpu in gpus if gpu.preset == gpus[0].preset}
        self._paint()

    def action_take(self) -> None:
        gpus = self.found.gpus if self.found is not None else ()
        chosen = tuple(gpu for gpu in gpus if gpu.index in self._chosen and gpu.visible)
        if not chosen:
            self._say("None is chosen: Space marks the one under the cursor.")
        elif len({gpu.preset for gpu in chosen}) > 1:
            self._say("They are of several kinds: a prediction is for one.")
        else:
            self.dismiss(chosen)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """A click."""
        event.stop()
        self.action_pick()

    def _say(self, text: str) -> None:
        self.app.clear_notifications()
        self.notify(text, severity="warning", timeout=5, markup=False)


def _indented(text: str) -> str:
    return " " * _MARK_CELLS + text


def _process_row(process: GpuProcess, width: int) -> str:
    user = fit(harmless(process.user or NOT_KNOWN), _USER_CELLS)
    size = fit_right(format_bytes(process.memory_bytes), _SIZE_CELLS)
    command = harmless(process.command or "a process that cannot be seen from here")
    return fit(f"{user}{size}  {command} ({process.pid})", width).rstrip()
