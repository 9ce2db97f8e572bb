"""One rank of a run as Hugging Face's Trainer carries it out: same model, DeepSpeed JSON and data order.

Called by the zygote in place of our worker. It leaves the same kind of record: the step after warm-up and the
last but one as events, stamped when the device has finished them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.window import first_and_last
from llmtop.presets.spec import RunSpec
from llmtop.profiler.probes.inmodules import count_parameters
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import ModelBuilt, RankFinished, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.statefile import Position
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.data import SequenceOrder
from llmtop.trainer.worker.place import Place, place_from_environment
from llmtop.trainer.worker.session import import_libraries
from llmtop.trainer.worker.tokens import load_tokens


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The packed sequences in the order in which our worker takes them."""

    def __init__(self, run: RunDir, spec: RunSpec, place: Place) -> None:
        options = spec.options
        self._tokens = load_tokens(run, spec, place)
        self._length = options.seq_len
        order = SequenceOrder(len(self._tokens) // options.seq_len, options.seed)
        self._numbers = order.take(Position(), options.steps * spec.global_batch)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self._numbers[index]) * self._length
        ids = torch.from_numpy(self._tokens[start : start + self._length].astype("int64"))
        return {"input_ids": ids, "labels": ids}


class InOrder(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Without the shuffle: the data set is in order already."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Stamps(TrainerCallback):  # type: ignore[misc]
    """Tells when the steps at both ends of the window are done on the device."""

    def __init__(self, spec: RunSpec, events: EventWriter) -> None:
        self._spec = spec
        self._events = events
        self._ends = first_and_last(spec.options.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self._ends:
            if not self._spec.on_cpu:
                torch.cuda.synchronize()
            self._events.write(StepFinished(step=state.global_step, tokens=self._spec.tokens_per_step))


def main(arguments: list[str]) -> None:
    run = RunDir.open(Path(arguments[0]))
    spec, place = run.spec(), place_from_environment()
    events = EventWriter(run.events_path(place.source), place.source)
    # A forked process has read the variable already; our worker says it again as well.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if spec.on_cpu:
        # As our worker: no collective that has to be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import_libraries(spec)
    arguments_ = training_arguments(run, spec)
    model = build_model(spec, run.deepspeed_config(), torch.device(arguments_.device))
    counts = count_parameters(model)
    events.write(ModelBuilt(params=counts.params, trainable_params=counts.trainable_params))
    trainer = InOrder(
        model=model,
        args=arguments_,
        train_dataset=Sequences(run, spec, place),
        data_collator=default_data_collator,
        callbacks=[Stamps(spec, events)],
    )
    trainer.train()
    peak = None if spec.on_cpu else torch.cuda.max_memory_allocated()
    events.write(RankFinished(reason="completed", last_step=spec.options.steps, peak_allocated_bytes=peak))


def training_arguments(run: RunDir, spec: RunSpec) -> Any:
    """What the options say, in Trainer's words; everything else as Trainer has it by default."""
    options = spec.options
    return TrainingArguments(
        output_dir=str(run.path / "hf_trainer"),
        deepspeed=run.deepspeed_config(),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.grad_accum,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_epsilon=options.adam_epsilon,
        max_grad_norm=options.max_grad_norm,
        lr_scheduler_type=options.lr_schedule,
        warmup_steps=options.warmup_steps,
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        use_cpu=spec.on_cpu,
        seed=options.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
