"""What DeepSpeed's autotuner starts for each of its experiments: a run of `benchmarks.tune`, in few lines.

Started by the launcher as a file, with DeepSpeed's own arguments; the configuration says what is tried.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import msgspec
import torch

from llmtop.presets.spec import RunSpec
from llmtop.trainer.worker.build import build_model

SPEC = "LLMTOP_PEER_SPEC"
"""In the environment: the spec as JSON."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    args = deepspeed.add_config_arguments(parser).parse_args()
    spec = msgspec.json.decode(os.environ[SPEC], type=RunSpec)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Otherwise init_distributed compiles a shared-memory collective for minutes on its first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    model = build_model(spec, {}, torch.device("cpu"))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    size = (engine.train_micro_batch_size_per_gpu(), spec.options.seq_len)
    # The autotuner ends the process from inside the engine once it has measured enough steps.
    for _ in range(spec.options.steps * engine.gradient_accumulation_steps()):
        tokens = torch.randint(0, spec.model.vocab_size, size)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


if __name__ == "__main__":
    main()
