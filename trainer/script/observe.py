"""`python -m llmtop.trainer.script.observe PID`: begins a run that looks at a process; prints its folder."""

from __future__ import annotations

import sys

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.trainer.script.start import observe


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not arguments[0].isdecimal():
        raise UsageError("the observer takes one argument, the number of a process")
    run = observe(int(arguments[0]))
    sys.stderr.write(f"llmtop: watched as run {run.run_id}: llmtop attach {run.run_id}\n")
    sys.stdout.write(f"{run.path.resolve()}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LlmtopError as error:
        sys.stderr.write(f"llmtop: {error}\n")
        sys.exit(error.exit_code)
