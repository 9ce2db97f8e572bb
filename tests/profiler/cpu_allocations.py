"""Every allocation of a step of real modelling code on the CPU, and of its simulated step, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import GpuSpec, RunOptions, RunSpec
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.tape.build import Builder, engine_plan
from llmtop.profiler.memory.tape.engine import Engine
from llmtop.profiler.memory.tape.machine import LEAST_BYTES, Machine, Tensor
from llmtop.trainer.worker.kernels import enable_checkpointing

Requests = list[tuple[int, int]]
"""Bytes, below zero for what is given back, and the number of the tensor."""
_FIRST_BLOCK = "first block"


def without_passing(requests: Requests) -> list[int]:
    """Sizes in order, but for what is given back before anything else is asked for; of several that are given
    back one after another the order tells nothing."""
    left: Requests = []
    for size, tensor in requests:
        if size < 0 and left and left[-1] == (-size, tensor):
            left.pop()
        else:
            left.append((size, tensor))
    found: list[int] = []
    together: list[int] = []
    for size, _ in [*left, (0, 0)]:
        if size < 0:
            together.append(size)
        else:
            found += [*sorted(together), size]
            together = []
    return found[:-1]


def asked_of_cpu(config: dict[str, Any], options: RunOptions) -> Requests:
    """The second step's, from the first block on; gradients of weights go as soon as they are there."""
    built = AutoConfig.for_model(**config)
    built.use_cache = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        built, attn_implementation=options.attention, dtype=torch.bfloat16
    ).to(torch.bfloat16)  # as DeepSpeed does with what a model's code keeps in fp32
    model.train()
    if options.gradient_checkpointing:
        enable_checkpointing(model, reentrant=options.checkpointing_reentrant)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    block.register_forward_pre_hook(_tell_of_block)
    ids = torch.randint(0, built.vocab_size, (options.micro_batch, options.seq_len))
    model(input_ids=ids, labels=ids).loss.backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    return _requests(seen.profiler.kineto_results.experimental_event_tree())


def _tell_of_block(*_: Any) -> None:
    with record_function(_FIRST_BLOCK):
        pass


def _requests(roots: list[Any]) -> Requests:
    events: list[tuple[int, int, int, tuple[str, ...]]] = []
    begins: list[int] = []

    def walk(node: Any, stack: tuple[str, ...]) -> None:
        if node.name == "[memory]":
            fields = node.extra_fields
            events.append((node.start_time_ns, fields.alloc_size, fields.ptr, stack))
        elif node.name == _FIRST_BLOCK:
            begins.append(node.start_time_ns)
        for child in node.children:
            walk(child, stack if node.name == "[memory]" else (node.name, *stack))

    for root in roots:
        walk(root, ())
    alive: dict[int, int] = {}
    found: Requests = []
    for time, size, pointer, stack in sorted(events):
        if size < 0 and pointer in alive:
            found.append((size, alive.pop(pointer)))
        elif size >= LEAST_BYTES and time >= min(begins) and not _is_of_cpu_alone(stack):
            alive[pointer] = len(found)
            found.append((size, len(found)))
    return found


def _is_of_cpu_alone(stack: tuple[str, ...]) -> bool:
    """Of two factors of different precision the CPU casts one; a GPU's kernel reads both as they are."""
    return "aten::_to_copy" in stack and "aten::mul" in stack[stack.index("aten::_to_copy") :]


class _Recording(Machine):
    """A device that remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Requests = []
        self._numbers: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> Tensor:
        tensor = super().new(size)
        if size >= LEAST_BYTES:
            self._numbers[id(tensor)] = size, len(self.asked)
            self.asked.append((size, len(self.asked)))
        return tensor

    def drop(self, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.holders == 1 and id(tensor) in self._numbers:
            size, number = self._numbers.pop(id(tensor))
            self.asked.append((-size, number))
        super().drop(tensor)

    def passing(self, size: int) -> None:
        """Leaves nothing."""

    def forget(self) -> None:
        """What was asked before is not told any more, nor that it is given back."""
        self.asked, self._numbers = [], {}


class _Taking(Engine):
    """Gradients go as soon as they are there."""

    def ready(self, elements: int, gradient: Tensor) -> None:
        self.machine.drop(gradient)


def asked_of_tape(config: dict[str, Any], options: RunOptions) -> Requests:
    """The same of the simulated step."""
    spec = RunSpec(
        name="test",
        model=read_shape(config, "test", "test"),
        gpu=GpuSpec(name="h200", compute_capability="8.0"),
        model_source="",
        hf_config=config,
        options=options,
    )
    sizes, machine = sizes_of(spec), _Recording()
    model = Builder(spec, sizes, machine, _Taking(machine, engine_plan(spec, sizes, 0))).model()
    model.run()
    model.at_block = lambda block: machine.forget() if block == 0 and not machine.in_backward else None
    model.run()
    return machine.asked
