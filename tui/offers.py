"""What the monitor has for a run: the panels of its overview, and the keys that it answers."""

from __future__ import annotations

from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.tui.feeds.view import RunView


def offers(action: str, view: RunView | None) -> bool:
    """Whether an action of the monitor is one of this run by now; None: nothing is known of it yet."""
    if action == "resume":
        return view is not None and may_go_on(view)
    if action == "fix":
        return view is not None and may_be_fixed(view.state)
    if action == "change" and view is not None and view.spec.script is not None:
        return False  # it is nobody's but its own
    if action in ("stop", "leave", "change", "snapshot"):
        return view is None or view.state.status not in ENDED
    return True


def may_be_fixed(state: RunState) -> bool:
    """Whether a run ran out of memory and could be gone on with here, with a change that fits."""
    return state.status == "out_of_memory" and not state.imported and not state.elsewhere


def may_go_on(view: RunView) -> bool:
    """Whether a run has ended and could be gone on with here: no imported one, none of another machine, no
    command of the user's."""
    state = view.state
    is_here = not state.imported and not state.elsewhere
    return state.status in ENDED and is_here and view.spec.script is None


def panel_classes(view: RunView) -> dict[str, bool]:
    """A small overview of a run on GPUs shows these in place of the host, unless it offloads to it."""
    options, state = view.spec.options, view.state
    return {
        "-starting": state.is_beginning,
        "-gpu": not view.spec.on_cpu,
        "-offload": options.offload_optimizer != "none" or options.offload_param != "none",
    }
