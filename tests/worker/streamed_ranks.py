"""One rank that builds models from folders of weights in ZeRO-3 shards: `RUNDIR RUNDIR ...`.

For each it saves all parameters gathered and all buffers, the logits of a fixed input, and how much
memory of its own (not of files) it took while it loaded.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.pdeath import die_with_parent
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.malloc import return_freed_memory
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group


class PeakAnonymous:
    """The largest anonymous resident set of this process while the block runs."""

    def __enter__(self) -> PeakAnonymous:
        self.before_bytes = self.peak_bytes = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def gathered(model: Any) -> dict[str, Any]:
    ids = torch.arange(24).remainder(100).view(2, 12)
    with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        return {
            "logits": model.eval()(input_ids=ids).logits.float(),
            "tensors": {name: tensor.detach().clone() for name, tensor in named.items()},
        }


def main(folders: list[str]) -> None:
    die_with_parent()
    return_freed_memory()
    place = place_from_environment()
    device = join_process_group(place, on_cpu=True)
    for folder in folders:
        run = RunDir.open(Path(folder))
        spec = run.spec()
        with EventWriter(run.events_path(place.source), place.source) as events, PeakAnonymous() as memory:
            model: Any = build_model(spec, run.deepspeed_config(), device, events.write)
        held = sum(p.ds_tensor.nbytes for p in model.parameters())
        told = {
            "extra_bytes": memory.peak_bytes - memory.before_bytes - held,
            "model_bytes": sum(p.ds_numel * p.element_size() for p in model.parameters()),
        }
        (run.path / f"told-{place.rank}.json").write_text(json.dumps(told))
        torch.save(gathered(model), run.path / f"gathered-{place.rank}.pt")
        # Transformers builds in shards for as long as this lives.
        model.llmtop_zero3 = None
        del model
    leave_process_group(device)


if __name__ == "__main__":
    main(sys.argv[1:])
