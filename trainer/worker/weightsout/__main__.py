"""`python -m llmtop.trainer.worker.weightsout`: writes weights of a saved state; job on standard input."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.trainer.elsewhere import Failed
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.weightsjob import Answer, WeightsJob


def main() -> NoReturn:
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=WeightsJob)
    # What libraries print must not stand among the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def answer(one: Answer) -> None:
        answers.write(msgspec.json.encode(one) + b"\n")

    try:
        from llmtop.trainer.worker.weightsout.job import do_job

        answer(do_job(job, answer))
    except LlmtopError as error:
        answer(Failed(what=error.what, why=error.why, fix=error.fix))
        sys.exit(error.exit_code)
    except OSError as error:
        answer(
            Failed(
                what=f"the weights cannot be written to {Path(job.target).parent}",
                why=f"{error.filename or job.target}: {error.strerror or error}",
            )
        )
        sys.exit(ExitCode.USAGE)
    sys.exit(ExitCode.DONE)


if __name__ == "__main__":
    main()
