"""A rank that is like any other, but for one setting of the run, on which it fails while it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.standby import mark_ready, standby_setting, wait_for_go
from llmtop.trainer.worker.__main__ import main

FAILS_ON_THREADS = 3
"""Threads a rank, of the setting that fails."""

if __name__ == "__main__":
    run, setting = RunDir.open(Path(sys.argv[1])), standby_setting()
    if run.spec(setting).options.threads_per_rank == FAILS_ON_THREADS:
        if setting is not None:
            mark_ready(run, setting, int(os.environ["RANK"]))
            wait_for_go(run, setting)
        sys.stderr.write("this setting was planted to fail\n")
        sys.exit(9)
    main(sys.argv[1:])
