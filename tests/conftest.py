"""How property tests draw their examples: the same ones everywhere, so that a check says the same twice.

`pytest --hypothesis-profile explore` draws others each time, and more of them.
"""

from __future__ import annotations

import importlib.util
import signal
import sys

# Under nohup a hang-up is ignored by all that is started; tests of what one does need that it is not.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if importlib.util.find_spec("hypothesis") is not None:
    # Without it the tests of a GPU machine still run.
    from hypothesis import settings

    # No deadline: how long an example takes is the machine's business.
    settings.register_profile("steady", derandomize=True, deadline=None)
    settings.register_profile("explore", derandomize=False, deadline=None, max_examples=500)
    settings.load_profile("steady")


def pytest_collection_finish() -> None:
    """Threads of torch would wait for each other in turns with the processes that tests start."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
