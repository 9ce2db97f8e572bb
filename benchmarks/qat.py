"""What quantization-aware training loses at 4 bits, and what rounding after training loses; a row for each.

    python -m benchmarks.qat --out benchmarks/results/qat_cpu.jsonl
    python -m benchmarks.qat --half-billion --out benchmarks/results/qat_gpu.jsonl   # one GPU, some 4 minutes
    python -m benchmarks.qat --half-billion --tiny --cpu                             # the same way, tried out

For each seed a model is trained, and goes on from there with the same text, steps and rates: as it was, and
with each kind of fake quantization. The first is then rounded by torchao exactly as the others are
(post-training quantization of the same bits). Perplexity is of held-out text, a tenth of the documents.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.halfbillion import installed_sources, settings, write_shape
from benchmarks.session import machine_of, run_main
from llmtop.presets import catalog
from llmtop.presets.resolve import Layer, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.presets.version import package_versions
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.supervisor.rankenv import free_port
from llmtop.trainer.weightsjob import Content, WeightsJob
from llmtop.trainer.weightsout import find_state
from llmtop.trainer.worker import session
from llmtop.trainer.worker.place import place_from_environment
from llmtop.trainer.worker.process_group import join_process_group, leave_process_group
from llmtop.trainer.worker.qat import base_config
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest
from llmtop.trainer.worker.text import read_pieces
from llmtop.trainer.worker.tokens import make_tokenizer
from llmtop.trainer.worker.weightsout.job import do_job

KINDS = ("int4-weight-only", "int8-int4")
HELD_OUT = 0.1
_ROWS = 16


class Bench:
    """Trains, writes and scores in one process, whose libraries are imported once."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root = options, root
        self.machine = machine_of(options)
        self.shape = write_shape(root / "half-billion", options.shape) if options.shape else None
        self.training, self.held_out = self._split()
        self._environment()
        self.place = place_from_environment()
        first = self.spec(seed=0, steps=1)
        self.model_name = first.model.name
        session.import_libraries(first)
        self.device = join_process_group(self.place, on_cpu=first.on_cpu)

    def close(self) -> None:
        leave_process_group(self.device)

    def spec(self, **values: Any) -> RunSpec:
        given: dict[str, Any] = {"gpus": 1, "zero": 2, "data": str(self.training), "save_at_end": True}
        given |= {"classify_every": 0, "kernel_profile_step": 0}
        given |= self.options.run
        if self.options.model or self.shape:
            given["model"] = self.options.model or str(self.shape)
        layers = [
            *recipe_layers(catalog.load_recipe(self.options.recipe)),
            Layer(ValueSource.COMMAND_LINE, "benchmark", {**given, **values}),
        ]
        return resolve(layers, name="qat", machine=self.machine)

    def trained(self, spec: RunSpec) -> RunDir:
        run = RunDir.create(self.root / "runs", spec, predict(spec), deepspeed_config(spec))
        with EventWriter(run.events_path(0), self.place.source) as events:
            session.train_in_group(run, self.place, self.device, events, StageLog(events), StopRequest())
        return run

    def folder(self, run: RunDir, content: Content = "full") -> Path:
        target = self.root / f"{run.run_id}-{content}"
        target.mkdir()
        job = WeightsJob(
            run=str(run.path),
            state=str(find_state(run)),
            target=str(target),
            content=content,
            dtype=run.spec().options.precision,
            shard_bytes=4 << 30,
        )
        do_job(job, lambda answer: None)
        return target

    def perplexity(self, run: RunDir, folder: Path, kind: str = "", group: int = 0) -> float:
        """Of the held-out text; with a `kind`, of the folder's weights rounded so as they are loaded."""
        from transformers import AutoModelForCausalLM, TorchAoConfig

        rounded: dict[str, Any] = {}
        if kind:
            rounded["quantization_config"] = TorchAoConfig(base_config(kind, group))  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_pretrained(folder, **rounded).to(self.device).eval()
        lost, count = 0.0, 0
        windows = self._windows(run)
        with torch.no_grad():
            for start in range(0, len(windows), _ROWS):
                ids = windows[start : start + _ROWS].to(self.device)
                logits = model(input_ids=ids).logits[:, :-1].float()
                losses = torch.nn.functional.cross_entropy(
                    logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum"
                )
                lost, count = lost + float(losses), count + ids[:, 1:].numel()
        self.scored_tokens = count
        return math.exp(lost / count)

    def _windows(self, run: RunDir) -> torch.Tensor:
        spec = run.spec()
        tokenizer = make_tokenizer(run, spec)
        ids = [token for text in self.held_out for token in (*tokenizer.encode([text])[0], tokenizer.end_id)]
        length = spec.options.seq_len
        whole = len(ids) // length * length
        return torch.tensor(ids[:whole]).view(-1, length)[: self.options.windows]

    def _split(self) -> tuple[Path, list[str]]:
        if self.options.text_bytes:
            texts = installed_sources(self.options.text_bytes)
        else:
            texts = [piece.text for piece in read_pieces(self.options.data, "text")]
        # Documents of one kind lie beside each other.
        random.Random(0).shuffle(texts)
        held_out = texts[: max(1, round(HELD_OUT * len(texts)))]
        path = self.root / "training.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[len(held_out) :]))
        return path, held_out

    def _environment(self) -> None:
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }


def rows_of_seed(bench: Bench, seed: int) -> Iterator[dict[str, Any]]:
    options = bench.options
    began = time.perf_counter()
    base = bench.folder(bench.trained(bench.spec(seed=seed, steps=options.steps)))
    on = {
        "model": str(base),
        "steps": options.more_steps,
        "learning_rate": options.more_rate,
        "seed": 1000 + seed,
    }
    plain_run = bench.trained(bench.spec(**on))
    plain = bench.folder(plain_run)
    unrounded = bench.perplexity(plain_run, plain)
    for kind in KINDS:
        for group in options.groups:
            after = bench.perplexity(plain_run, plain, kind, group)
            run = bench.trained(bench.spec(**on, qat=kind, qat_group=group))
            trained = bench.perplexity(run, bench.folder(run, "quantized"))
            yield {
                "seed": seed,
                "kind": kind,
                "group": group,
                "perplexity_unrounded": unrounded,
                "perplexity_rounded_after": after,
                "perplexity_trained_rounded": trained,
                "nats_lost_after": math.log(after / unrounded),
                "nats_lost_trained": math.log(trained / unrounded),
                **_setting(bench, plain_run.spec()),
                "seconds_so_far": round(time.perf_counter() - began, 1),
            }


def _setting(bench: Bench, spec: RunSpec) -> dict[str, Any]:
    options = bench.options
    return {
        "recipe": options.recipe,
        "model": bench.model_name,
        "gpu": spec.gpu.name,
        "precision": spec.options.precision,
        "steps": options.steps,
        "more_steps": options.more_steps,
        "more_rate": options.more_rate,
        "tokens_a_step": spec.tokens_per_step,
        "scored_tokens": bench.scored_tokens,
        "load": round(os.getloadavg()[0], 1),
        "versions": package_versions(("torch", "torchao", "transformers", "deepspeed")),
    }


def _line(row: dict[str, Any]) -> str:
    found = [row[f"perplexity_{which}"] for which in ("unrounded", "rounded_after", "trained_rounded")]
    as_it_is, after, trained = (f"{one:.4f}" for one in found)
    return (
        f"seed {row['seed']} {row['kind']} group {row['group']}: {as_it_is} as it is, {after} rounded after,"
        f" {trained} trained"
    )


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What is lost, and the part of it that training with it takes back, over the seeds."""
    lines = []
    for kind, group in sorted({(row["kind"], row["group"]) for row in rows}):
        mine = [row for row in rows if (row["kind"], row["group"]) == (kind, group)]
        after = [row["nats_lost_after"] for row in mine]
        trained = [row["nats_lost_trained"] for row in mine]
        back = [1 - new / old for new, old in zip(trained, after, strict=True) if old > 0]
        lines.append(
            f"{kind}, group {group}, {len(mine)} seeds: rounded after {_spread(after)} nats a token, trained"
            f" {_spread(trained)}; taken back {_spread(back, 100)} %"
        )
    return lines


def _spread(values: list[float], scale: float = 1.0) -> str:
    if not values:
        return "n/a"
    low, high = min(values), max(values)
    return f"{scale * statistics.fmean(values):.4g} ({scale * low:.4g} to {scale * high:.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument("--recipe", default="cpu-demo")
    parser.add_argument(
        "--model", default="", help="in place of the recipe's: a preset, or a folder of weights"
    )
    parser.add_argument("--data", default="builtin:english")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, whatever there is")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--groups", type=int, nargs="+", default=[32])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--more-steps", type=int, default=60)
    parser.add_argument("--more-rate", type=float, default=1e-3)
    parser.add_argument("--windows", type=int, default=512, help="sequences of held-out text, at most")
    parser.add_argument("--half-billion", action="store_true", help="0.5B weights, on installed sources")
    parser.add_argument("--tiny", action="store_true", help="with --half-billion: everything a thousandth")
    parser.set_defaults(shape={}, run={}, text_bytes=0)
    options = parser.parse_args()
    if options.half_billion:
        parser.set_defaults(**settings(tiny=options.tiny))
        options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="llmtop-qat-") as folder:
        bench = Bench(options, Path(folder))
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for row in rows_of_seed(bench, seed):
                rows.append(row)
                print(_line(row), flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        bench.close()
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    run_main(main)
