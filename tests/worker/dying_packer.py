"""A process that packs nothing: half a file, and then the kernel's way to end who takes too much memory."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from llmtop.trainer.quantize.job import Job, PackJob

if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    assert isinstance(job, PackJob)
    Path(job.target).write_bytes(b"GGUF")
    os.kill(os.getpid(), signal.SIGKILL)
