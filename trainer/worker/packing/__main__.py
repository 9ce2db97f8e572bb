"""One job of `llmtop quantize`: read from standard input, answered on standard output, a line each."""

from __future__ import annotations

import os
import sys

import msgspec

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.elsewhere import Failed
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.quantize.job import Answer, Job, MeasureJob, PackJob
from llmtop.trainer.quantize.target import Target
from llmtop.trainer.worker.packing.saying import Say


def main() -> int:
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    # Libraries print; nothing but answers may come where answers are read.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    try:
        say(do(job, say))
    except LlmtopError as error:
        say(Failed(what=error.what, why=error.why, fix=error.fix))
    except OSError as error:
        what = f"cannot read or write {error.filename or 'the files'}"
        say(Failed(what=what, why=error.strerror or str(error)))
    except MemoryError:
        say(Failed(what="host memory ran out", fix="do it when more memory is free"))
    return 0


def do(job: PackJob | MeasureJob, say: Say) -> Answer:
    """The last answer. Raises LlmtopError."""
    # Each loads its own libraries: a GGUF file needs no torch.
    if isinstance(job, MeasureJob):
        from llmtop.trainer.worker.packing.measuring import measure

        return measure(job, say)
    if Target(form=job.form).packer == "gguf":
        from llmtop.trainer.worker.packing.ggufwriting import write_gguf

        return write_gguf(job, say)
    from llmtop.trainer.worker.packing.bnbfolder import write_folder

    return write_folder(job, say)


if __name__ == "__main__":
    sys.exit(main())
