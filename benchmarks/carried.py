"""One rank of our worker at ZeRO-3 that counts what its collectives carry, and reads NVLink's totals.

Called by the zygote in place of our worker; leaves `carried<rank>.json` in the run's folder. Collectives are
counted where torch takes them, so it is what is really asked of NCCL or gloo, by whoever asks. Between the
ends of the two steps of the window (`window.py`) all ranks stand still while rank 0 reads the totals.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.window import first_and_last
from benchmarks.zero3_traffic import Tour, Visit, Way, Weight
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.rundir import RunDir

_COUNTED: dict[str, tuple[str, str]] = {
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "_all_gather_base": ("all_gather", "output_tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_reduce_scatter_base": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
}
"""torch's functions: the kind of collective, and the argument that has the tensor in its full shape."""
_STILL_BYTES = 4_000_000
"""What may pass on idle links while they are read; a step moves thousands of times that."""
_PATIENCE = timedelta(minutes=3)


def carried_path(run: RunDir, rank: int) -> Path:
    return run.path / f"carried{rank}.json"


def main(arguments: list[str]) -> None:
    from llmtop.trainer.worker.__main__ import main as worker

    run = RunDir.open(Path(arguments[0]))
    Watch(run, int(os.environ["RANK"])).install()
    worker(arguments)


class Collectives:
    """Bytes by kind and size of the group since the last `take`."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._inside = False
        """One of torch's functions may call another of them."""

    def take(self) -> dict[str, int]:
        """`kind/ranks` to bytes of the tensors in their full shape."""
        taken, self._bytes = dict(self._bytes), Counter()
        return taken

    def install(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        for name, (kind, tensor) in _COUNTED.items():
            plain = getattr(distributed_c10d, name, None)
            if plain is not None:
                counting = self._counting(plain, kind, tensor)
                for place in (dist, distributed_c10d):
                    setattr(place, name, counting)

    def _counting(self, plain: Callable[..., Any], kind: str, tensor: str) -> Callable[..., Any]:
        import torch.distributed as dist

        signature = inspect.signature(plain)

        @wraps(plain)
        def counting(*given: Any, **named: Any) -> Any:
            if self._inside:
                return plain(*given, **named)
            bound = signature.bind(*given, **named)
            whole = bound.arguments[tensor]
            pieces = whole if isinstance(whole, list) else [whole]
            ranks = dist.get_world_size(bound.arguments.get("group"))
            self._bytes[f"{kind}/{ranks}"] += sum(piece.nbytes for piece in pieces)
            self._inside = True
            try:
                return plain(*given, **named)
            finally:
                self._inside = False

        return counting


class Recorder:
    """The newest micro-batch's way through the model, as the coordinator of the weights sees it."""

    def __init__(self) -> None:
        self._visits: list[Visit] = []
        self._modules: dict[int, tuple[Any, ...]] = {}
        """Each module's own weights."""

    def install(self) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        kind: Any = PartitionedParameterCoordinator
        reset, fetch, release = kind.reset_step, kind.fetch_sub_module, kind.release_sub_module

        def reset_step(coordinator: Any) -> None:
            self._visits = []
            reset(coordinator)

        def fetch_sub_module(coordinator: Any, module: Any, forward: bool) -> None:
            self._note(module, _way(forward))
            fetch(coordinator, module, forward)

        def release_sub_module(coordinator: Any, module: Any, forward: bool = False) -> None:
            self._note(module, "after_forward" if forward else "after_backward")
            release(coordinator, module, forward)

        kind.reset_step, kind.fetch_sub_module = reset_step, fetch_sub_module
        kind.release_sub_module = release_sub_module

    def _note(self, module: Any, way: Way) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params

        self._visits.append(Visit(module.ds_id, way))
        self._modules[module.ds_id] = tuple(iter_params(module))

    def tour(self, model: Any) -> Tour:
        weights = list(model.parameters())
        places = {weight.ds_id: place for place, weight in enumerate(weights)}
        numbers = {module: number for number, module in enumerate(self._modules)}
        return Tour(
            weights=tuple(
                Weight(elements=w.ds_numel, width=w.ds_tensor.element_size(), trained=w.requires_grad)
                for w in weights
            ),
            modules=tuple(
                tuple(sorted({places[weight.ds_id] for weight in own})) for own in self._modules.values()
            ),
            visits=tuple(Visit(numbers[visit.module], visit.way) for visit in self._visits),
        )


def _way(forward: bool) -> Way:
    import torch

    if not forward:
        return "backward"
    inside_backward = torch._C._current_graph_task_id() != -1
    return "recompute" if inside_backward else "forward"


class Watch:
    """Counts by step; reads the links at both ends of the window; writes what it has at the last step."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self._run, self._rank = run, rank
        self._spec: RunSpec = run.spec()
        self._collectives = Collectives()
        self._recorder = Recorder()
        self._steps: dict[int, dict[str, int]] = {}
        self._links: list[list[dict[str, int | None]]] = []

    def install(self) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        self._collectives.install()
        self._recorder.install()
        plain: Callable[..., Any] = DeepSpeedEngine.step
        watch = self

        def step(engine: Any, *given: Any, **named: Any) -> Any:
            ends = engine.is_gradient_accumulation_boundary()
            answer = plain(engine, *given, **named)
            if ends:
                watch._after_step(engine)
            return answer

        DeepSpeedEngine.step = step

    def _after_step(self, engine: Any) -> None:
        number = len(self._steps) + 1
        self._steps[number] = self._collectives.take()
        window = first_and_last(self._spec.options.steps)
        if number in window and not self._spec.on_cpu:
            self._read_links(number)
        if number == window[1]:
            self._write(engine)

    def _read_links(self, step: int) -> None:
        """While no rank does anything: they meet in the store, without a collective."""
        import torch
        from torch.distributed.distributed_c10d import _get_default_store

        from benchmarks.nvlink_allreduce import settled
        from llmtop.profiler.hardware.nvml import NvmlReader

        torch.cuda.synchronize()
        store: Any = _get_default_store()
        arrived, read = f"llmtop-arrived-{step}", f"llmtop-read-{step}"
        if store.add(arrived, 1) == self._spec.world_size:
            store.set(f"{arrived}-all", "1")
        if self._rank:
            store.wait([read], _PATIENCE)
            return
        store.wait([f"{arrived}-all"], _PATIENCE)
        reader = NvmlReader()
        devices = reader.visible_indices()[: self._spec.world_size]
        totals = settled(lambda: [reader.link_totals(index) for index in devices], still_bytes=_STILL_BYTES)
        reader.close()
        self._links.append([{"tx": each.nvlink_tx_bytes, "rx": each.nvlink_rx_bytes} for each in totals])
        store.set(read, "1")

    def _write(self, engine: Any) -> None:
        import msgspec

        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        tour = self._recorder.tour(engine.module)
        whole = {
            "steps": self._steps,
            "links": self._links,
            "order_is_known": coordinator.is_complete_trace(),
            "gradient_bytes": engine.communication_data_type.itemsize,
            "tour": msgspec.to_builtins(tour),
        }
        carried_path(self._run, self._rank).write_text(json.dumps(whole))
