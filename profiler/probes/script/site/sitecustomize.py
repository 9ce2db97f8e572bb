"""What Python loads at its start, before the script: it waits for the libraries that train.

This folder stands first on PYTHONPATH in every process of `llmtop run -- COMMAND`. A `sitecustomize` of the
machine's own, which Python would have loaded in place of this one, is loaded after it.
"""

import os
import sys


def _load_the_machines_own() -> None:
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120, PTH118 - pathlib takes ten times as long
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.realpath(entry) != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    if "sitecustomize" not in sys.modules and ours is not None:
        # The import that is under way looks for it there.
        sys.modules["sitecustomize"] = ours


def _wait_for_libraries() -> None:
    if not os.environ.get("LLMTOP_SCRIPT_RUN"):
        return
    try:
        from llmtop.profiler.probes.script.importhook import install
    except ImportError as error:
        sys.stderr.write(
            f"llmtop: this process is not watched from inside: {error}\n"
            f"llmtop: install llmtop-deepspeed in the environment of {sys.executable}\n"
        )
        return
    install()


_wait_for_libraries()
_load_the_machines_own()
