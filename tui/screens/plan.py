"""Plan a run: every option by keyboard, and what it would need, predicted again at each change."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import OptionList, Static

from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.calibration import with_calibration
from llmtop.profiler.cost.where import Where, gpu_names, where
from llmtop.profiler.hardware.gpuuse import GpusInUse, GpuUse, visible_devices
from llmtop.tui.asking.launchtext import launch_command
from llmtop.tui.asking.requests import LaunchAsked, TuneAsked
from llmtop.tui.keys import PLAN_KEYS, bindings
from llmtop.tui.plans.found import MachineSeen, Traced
from llmtop.tui.plans.grid import grid_of
from llmtop.tui.plans.place import place_of, still_chosen
from llmtop.tui.plans.planning import (
    RECIPE,
    Draft,
    Plan,
    broken,
    choices,
    evaluate,
    evaluate_now,
    is_open,
    left_words,
    searched,
    shown,
    stepped,
)
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.editor import Editor
from llmtop.tui.widgets.gpupicker import GpuPicker, GpusRead
from llmtop.tui.widgets.headrows import READ_ONLY
from llmtop.tui.widgets.helparea import HelpArea
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.loadview import LoadView
from llmtop.tui.widgets.paint import harmless, two_sided
from llmtop.tui.widgets.placebars import crowded, crowded_words
from llmtop.tui.widgets.planrows import HELP, PlanRows, source_words
from llmtop.tui.widgets.predicted import PredictedPane, offered, verdict
from llmtop.tui.widgets.searchviews import SweepView, WhereView

FIRST_RECIPE = "cpu-demo"
"""What a plan starts from when nothing was named: it runs on any machine."""


_SEARCHED = ("gpu", "gpus", "nodes", "micro_batch", "zero", "gradient_checkpointing", "checkpointing_every")
"""What `where` looks for; an edit of one does not hold it fast, as a typed option does."""


class PlanScreen(Screen[None]):
    """Options on the left, their prediction on the right."""

    HELP_TITLE: ClassVar[str] = "Plan"
    """Of its keys in the help."""
    BINDINGS: ClassVar[list[BindingType]] = bindings(PLAN_KEYS)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-normal"), (130, "-wide")]

    def __init__(
        self,
        recipe: str | None,
        detect: Callable[[], Machine],
        gpus: Callable[[], GpusInUse] = GpusInUse,
    ) -> None:
        super().__init__()
        self._read_gpus = gpus
        self._in_use = GpusInUse()
        self._devices: tuple[GpuUse, ...] = ()
        """That were chosen by hand; of no account once the plan is for others."""
        self._draft = Draft(recipe=recipe or FIRST_RECIPE, assumed=None if recipe else FIRST_RECIPE)
        self._detect = detect
        self._machine: Machine | None = None
        self.plan: Plan | None = None
        self._last_spec: RunSpec | None = None
        """Of the last plan without an error, to show values from while there is one."""

    def compose(self) -> ComposeResult:
        yield Static(id="plan-head", markup=False)
        with Horizontal(id="plan"):
            with Vertical(id="choosing"):
                yield PlanRows()
                yield HelpArea(id="option-help", markup=False)
                yield Editor()
            yield PredictedPane()
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(PlanRows).focus()
        self._look()

    @work(thread=True, exclusive=True, group="machine")
    def _look(self) -> None:
        self.post_message(MachineSeen(self._detect()))
        self.post_message(GpusRead(self._read_gpus()))

    def on_machine_seen(self, message: MachineSeen) -> None:
        self._machine = message.machine
        self._show(self._draft)

    def on_gpus_read(self, message: GpusRead) -> None:
        self._in_use = message.found
        self._show_place()

    def on_resize(self) -> None:
        self._paint_head()

    def on_help_area_resized(self) -> None:
        self._paint_help()

    @property
    def settled(self) -> bool:
        """Whether there is a plan to show."""
        return self.plan is not None

    # --- one draft to the whole screen -----------------------------------------------------------

    def _keep(self, draft: Draft) -> None:
        leaves = draft.has_left and not self._draft.has_left
        self._draft = draft
        self._show(draft)
        if leaves and draft.assumed is not None:
            self._say(left_words(draft.assumed))

    def _show(self, draft: Draft) -> None:
        """Predict a draft and show it; it is not kept."""
        if self._machine is None:
            return
        plan, before = evaluate_now(draft, self._machine), self.plan
        self.plan = plan
        if plan.waits:
            self._trace(draft, self._machine)
        if plan.spec is not None:
            self._last_spec = plan.spec
        self.query_one(PlanRows).show(plan, self._last_spec)
        self.query_one(PredictedPane).plan = plan
        self._show_place()
        self._paint_help()
        if before is None or _offers(before) != _offers(plan):
            self.refresh_bindings()

    @work(thread=True, exclusive=True, group="trace")
    def _trace(self, draft: Draft, machine: Machine) -> None:
        evaluate(draft, machine)  # keeps what it had to find out
        self.post_message(Traced(draft))

    def on_traced(self, message: Traced) -> None:
        """Unless something else is looked at by now."""
        if self.plan is not None and self.plan.draft == message.draft:
            self._show(message.draft)

    # --- where it would run ----------------------------------------------------------------------

    @property
    def _chosen(self) -> tuple[GpuUse, ...]:
        return still_chosen(self.plan.spec if self.plan is not None else None, self._devices)

    def _show_place(self) -> None:
        spec = self.plan.spec if self.plan is not None else None
        self.query_one(PredictedPane).place = place_of(spec, self._machine, self._in_use, self._chosen)
        self._paint_head()

    def _verdict(self, plan: Plan) -> tuple[str, str]:
        """Of the plan; where it fits, but not beside those who use a GPU now, that is said instead."""
        place = self.query_one(PredictedPane).place
        gpus = place.gpus
        full = crowded(plan.prediction, gpus) if plan.launchable and plan.prediction is not None else ()
        if not full:
            return verdict(plan, place.host_limit_bytes)
        return f"✗ no room on {', '.join(f'GPU{gpu.index}' for gpu in full)}", "bold $text-error"

    def action_devices(self) -> None:
        plan, machine = self.plan, self._machine
        if plan is None or machine is None:
            return
        prediction = plan.prediction
        is_cpu = plan.spec is not None and plan.spec.on_cpu
        need = prediction.needed_bytes if prediction is not None and not is_cpu else None
        picker = GpuPicker(self._read_gpus, tuple(gpu.index for gpu in self._chosen), need)

        def chosen(devices: tuple[GpuUse, ...] | None) -> None:
            if picker.found is not None:
                self._in_use = picker.found
            if devices:
                self._devices = devices
                kind = devices[0].preset
                known = any(name == kind for name, _ in choices("gpu"))
                self._take({"gpu": kind if known else "auto", "gpus": len(devices), "nodes": 1})
            else:
                self._show_place()

        self.app.push_screen(picker, chosen)

    def action_load(self) -> None:
        plan = self.plan
        if plan is None or plan.spec is None:
            self._say("There is no model to load: the plan is not valid.")
            return
        self.app.push_screen(LoadView(plan.spec))

    def _paint_head(self) -> None:
        plan = self.plan
        if plan is None:
            return
        words, style = self._verdict(plan)
        parts: list[str | tuple[str, str]] = [("llmtop", "bold $text-primary"), "  plan"]
        spec = plan.spec or self._last_spec
        if spec is not None:
            parts.append(f"  {harmless(spec.model.name)}  {spec.world_size} x {harmless(spec.gpu.name)}")
        if self._chosen:
            parts.append((f": {', '.join(f'GPU{gpu.index}' for gpu in self._chosen)}", "$text-accent"))
        if getattr(self.app, "read_only", False):
            parts.append(READ_ONLY)
        if plan.draft.edits:
            parts.append((f"  {len(plan.draft.edits)} edited", "$text-accent"))
        right = Content.assemble((words, style))
        room = max(10, self.size.width - 2)
        self.query_one("#plan-head", Static).update(
            two_sided(Content.assemble(*parts), right, room), layout=False
        )

    def _paint_help(self) -> None:
        if self.plan is None:
            return
        key = self.query_one(PlanRows).key
        text = HELP[key]
        if key == RECIPE and self.plan.spec is not None:
            known = dict(choices(RECIPE))
            text = known.get(self._draft.recipe or "", text)
        area = self.query_one(HelpArea)
        # All rows but one for the help, one for the source.
        rows = max(1, area.content_size.height - 1)
        source = Content.styled(harmless(source_words(self.plan, self._last_spec, key)), "$muted")
        bad = broken(key)
        if bad:
            source = Content.styled(f"! cannot be used: {harmless(bad)}", "$text-warning")
        width = max(10, area.content_size.width)
        wrapped = textwrap.wrap(harmless(text), width, max_lines=rows, placeholder=" …")
        area.update(Content.assemble("\n".join(wrapped), "\n", source), layout=False)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_list.id == "options":
            self._paint_help()

    # --- editing ---------------------------------------------------------------------------------

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_list.id == "options":
            self.action_edit()

    def action_edit(self) -> None:
        if self.plan is None:
            return
        key = self.query_one(PlanRows).key
        value = shown(key, self.plan, self._last_spec)
        self.app.clear_notifications()
        self.query_one("#choosing").add_class("-editing")
        self.query_one(Editor).open(key, value, choices(key), is_open(key))

    def on_editor_previewed(self, message: Editor.Previewed) -> None:
        self._show(self._draft.edited(message.key, message.value))

    def on_editor_taken(self, message: Editor.Taken) -> None:
        self._keep(self._draft.edited(message.key, message.value))
        self._close_editor()

    def on_editor_cancelled(self) -> None:
        self.action_cancel_edit()

    def action_cancel_edit(self) -> None:
        self._show(self._draft)
        self._close_editor()

    def _close_editor(self) -> None:
        self.query_one("#choosing").remove_class("-editing")
        self.query_one(Editor).close()
        self.query_one(PlanRows).focus()

    def action_step(self, by: int) -> None:
        if self.plan is None:
            return
        key = self.query_one(PlanRows).key
        value = stepped(key, shown(key, self.plan, self._last_spec), by)
        if value is not None:
            self._keep(self._draft.edited(key, value))
        else:
            self._say("It has no steps: type it after Enter.")

    def action_reset(self) -> None:
        self._keep(self._draft.reset(self.query_one(PlanRows).key))

    def action_clear(self) -> None:
        self._keep(self._draft.cleared())

    def action_fix(self, number: int) -> None:
        found = offered(self.plan) if self.plan is not None else ()
        if number <= len(found):
            self._keep(self._draft.changed(found[number - 1].change))
        else:
            self._say(f"There is no change {number}.")

    # --- many candidates at once -------------------------------------------------------------------

    def action_sweep(self) -> None:
        plan = self.plan
        if plan is None or plan.spec is None:
            self._say("There is nothing to sweep: the plan is not valid.")
            return
        grid = grid_of(with_calibration(plan.spec))
        self.app.push_screen(SweepView(grid, _title(plan.spec)), self._take)

    def action_where(self) -> None:
        plan, machine = self.plan, self._machine
        if plan is None or plan.spec is None or machine is None:
            self._say("There is nothing to search for: the plan is not valid.")
            return
        draft = plan.draft
        for key in _SEARCHED:
            draft = draft.reset(key)
        draft = draft.away()  # it looks for GPUs
        note = left_words(draft.assumed) if draft.has_left and draft.assumed is not None else ""

        def search() -> Where:
            return where(lambda change: searched(draft, machine, change), gpus=gpu_names())

        self.app.push_screen(WhereView(search, harmless(plan.spec.model.name), note), self._take)

    def action_tune(self) -> None:
        plan = self.plan
        if plan is None or plan.spec is None or plan.refusals:
            self._say("There is nothing to search from: the plan is not valid.")
            return
        self.post_message(TuneAsked(plan.spec, self._take))

    def _take(self, change: Mapping[str, Any] | None) -> None:
        if change is not None and self.plan is not None and self.plan.spec is not None:
            options = self.plan.spec.options
            # Raw keys are no options of their own: they are taken as they are.
            new = {k: v for k, v in change.items() if "." in k or getattr(options, k) != v}
            self._keep(self._draft.changed(new))

    # --- launching -------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What cannot be done now is greyed out in the footer."""
        launch, fix = _offers(self.plan) if self.plan is not None else (False, False)
        if action == "review":
            return True if launch else None
        return fix if action == "fix" else True

    def on_key(self, event: events.Key) -> None:
        """A key that can do nothing now says why."""
        plan = self.plan
        if plan is None:
            if event.key == "L":
                self._say("This machine is still being looked at.")
        elif event.key == "L" and not plan.launchable:
            problem = plan.refusals[0] if plan.refusals else plan
            fix = f"\nfix: {problem.fix}" if problem.fix else ""
            self._say(f"{problem.what}{fix}", title="Cannot be launched")
        elif event.key in "12345" and not _offers(plan)[1]:
            self._say("There is no change to apply.")

    def _say(self, text: str, title: str = "") -> None:
        words = "\n".join(harmless(line) for line in text.splitlines())
        self.app.clear_notifications()
        self.notify(words, title=title, severity="warning", timeout=5, markup=False)

    def action_review(self) -> None:
        plan = self.plan
        if plan is not None and plan.spec is not None and plan.prediction is not None and plan.launchable:
            visible = visible_devices(self._chosen)
            command = launch_command(plan.draft, plan.spec, visible)
            place = self.query_one(PredictedPane).place
            notes = crowded_words(plan.prediction, place.gpus)
            asked = (plan.spec, plan.prediction, command, visible, notes)
            self.post_message(LaunchAsked(*asked, host_limit_bytes=place.host_limit_bytes))


def _title(spec: RunSpec) -> str:
    return f"{spec.model.name}  {spec.world_size} x {spec.gpu.name}"


def _offers(plan: Plan) -> tuple[bool, bool]:
    """Whether it can be launched, and whether there is a fix to apply."""
    return plan.launchable, bool(offered(plan))
