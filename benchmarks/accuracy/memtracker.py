"""torch's MemTracker on the cells that were measured: the real modelling code on fake tensors, no GPU.

    python -m benchmarks.accuracy.memtracker --minutes 8

It follows a plain torch loop: weights in the run's precision, fp32 copies that AdamW steps, two steps. What
it cannot follow (ZeRO's shards, offload, Triton kernels, packed weights) gets a reason. Cells that the
results have already are skipped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.accuracy.estimates import Estimate
from benchmarks.cells import plan
from benchmarks.rows import Cell, Row, RowLog, key_of, read_rows
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec

RESULTS = Path(__file__).parents[1] / "results" / "memtracker.jsonl"
MEASURED = Path(__file__).parents[1] / "results" / "memory_h200.jsonl"
STEPS = 2


def known() -> dict[str, Estimate]:
    """What has been found, by the cell's key."""
    return {
        key_of(row["cell"]): Estimate(bytes=row["bytes"], reason=row["reason"]) for row in read_rows(RESULTS)
    }


def cannot(spec: RunSpec) -> str | None:
    """Why a run has no form as a plain torch loop on one device."""
    options = spec.options
    reasons = {
        "knows no process group": spec.world_size > 1,
        "knows no ZeRO-3": options.zero == 3,
        "knows no offload": options.offload_optimizer != "none" or options.offload_param != "none",
        "Triton kernels take no fake tensors": options.liger,
        "packed weights take no fake tensors": options.quantization != "none",
        "adapters were not tried": options.lora_rank > 0,
        "bitsandbytes takes no fake tensors": not options.optimizer.startswith("adamw")
        or options.optimizer == "adamw_8bit",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def tracked_bytes(spec: RunSpec) -> int:
    """The tracker's peak over two steps. Needs torch and transformers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    options = spec.options
    with FakeTensorMode():
        model = _model(spec)
        wide = options.precision == "fp32"
        copies = [torch.nn.Parameter(each if wide else each.detach().float()) for each in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters() if wide else copies)
        tokens = torch.randint(0, spec.model.vocab_size, (options.micro_batch, options.seq_len))
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *([] if wide else copies))
        with tracker:
            for _ in range(STEPS):
                for _ in range(options.grad_accum):
                    tracker.reset_mod_stats()
                    model(input_ids=tokens, labels=tokens).loss.backward()
                if not wide:
                    _hand_over(list(model.parameters()), copies)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        peaks: dict[Any, dict[str, int]] = tracker.get_tracker_snapshot("peak")
    return max(sizes["Total"] for sizes in peaks.values())


def _model(spec: RunSpec) -> Any:
    from transformers import AutoModelForCausalLM

    from llmtop.trainer.worker.build import DTYPES, model_config
    from llmtop.trainer.worker.kernels import enable_checkpointing

    options = spec.options
    # SDPA keeps the same tensors for the backward pass as FlashAttention, which asks for a real GPU.
    attention = "eager" if options.attention == "eager" else "sdpa"
    model = AutoModelForCausalLM.from_config(
        model_config(spec), attn_implementation=attention, dtype=DTYPES[options.precision]
    )
    if options.gradient_checkpointing:
        enable_checkpointing(
            model, reentrant=options.checkpointing_reentrant, every=options.checkpointing_every
        )
    return model.train()


def _hand_over(parameters: list[Any], copies: list[Any]) -> None:
    for parameter, copy in zip(parameters, copies, strict=True):
        copy.grad, parameter.grad = parameter.grad.float(), None


def row_of(cell: Cell) -> Row:
    began = time.monotonic()
    machine = Machine(gpu="h200", gpus=cell.get("gpus", 1), host_memory_bytes=None)
    spec = plan({"gpu": "h200", **cell}, machine, name="tracked").spec
    reason = cannot(spec)
    found: int | None = None
    if reason is None:
        try:
            found = tracked_bytes(spec)
        except (NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
            # The tracker's own limits: they belong in the table, with its words.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return {
        "cell": cell,
        "bytes": found,
        "reason": reason or "",
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after this")
    until = time.monotonic() + 60 * parser.parse_args().minutes
    log = RowLog(RESULTS)
    for row in read_rows(MEASURED):
        if row["status"] != "completed" or row["cell"] in log:
            continue
        if time.monotonic() > until:
            print("out of time; call again")
            break
        found = row_of(row["cell"])
        log.add(found)
        print(found["seconds"], found["bytes"], found["reason"], row["cell"]["model"], flush=True)


if __name__ == "__main__":
    main()
