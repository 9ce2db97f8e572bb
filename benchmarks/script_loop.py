"""A DeepSpeed loop as people write them; prints the median wall time and the processor time of its steps.

With a number of blocks it also prints, of each, the processor time a step inside the calls of llmtop's hook.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

WARM_UP, STEPS = 20, 150
BLOCK_WARM_UP, BLOCK_STEPS = 300, 100
"""The first steps of a process are looked at more closely, and how often memory is read settles in them."""
_CALLS = ("forward", "backward", "step")
WRITER = "llmtop-events"
"""The name of the thread that writes what the hook tells."""


class Clock:
    """Processor time of this thread in the hook's calls, without the engine's own that they make."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._own = 0.0

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began, self._own = time.thread_time(), 0.0
            answer = call(*given, **named)
            self.seconds[name] += time.thread_time() - began - self._own
            return answer

        return timed

    def within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            answer = call(*given, **named)
            self._own += time.thread_time() - began
            return answer

        return timed


def hook_seconds(engine: Any, step: Callable[[], None], blocks: int) -> list[dict[str, float]]:
    """By call, a step, of each block. Without the hook it is what the clock itself takes there, on caches
    that the step has swept: far more than in a loop of its own."""
    watch, clock = engine.forward.__self__, Clock()
    watched = hasattr(watch, "_own")
    for name in _CALLS:
        own = watch._own[name] if watched else getattr(engine, name)
        if watched:
            watch._own[name] = clock.within(own)
        inner = getattr(watch, name) if watched else clock.within(own)
        setattr(engine, name, clock.around(name, inner))
    for _ in range(BLOCK_WARM_UP):
        step()
    found: list[dict[str, float]] = []
    for _ in range(blocks):
        clock.seconds.clear()
        before = thread_seconds(WRITER)
        for _ in range(BLOCK_STEPS):
            step()
        told = {name: clock.seconds[name] / BLOCK_STEPS for name in _CALLS}
        found.append({**told, "writer's thread": (thread_seconds(WRITER) - before) / BLOCK_STEPS})
    return found


def thread_seconds(name: str) -> float:
    """Processor time so far of the threads of that name."""
    import threading

    threads = [thread for thread in threading.enumerate() if thread.name == name]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
    return sum(time.clock_gettime(clock) for clock in clocks)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    ids = torch.randint(0, 512, (2, 64))

    def step() -> None:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()

    if len(sys.argv) > 1:
        print(json.dumps(hook_seconds(engine, step, int(sys.argv[1]))), flush=True)
        return
    seconds: list[float] = []
    cpu = 0.0
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            cpu = time.process_time()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    cpu = (time.process_time() - cpu) / STEPS
    print(json.dumps([statistics.median(seconds[WARM_UP:]), cpu]), flush=True)


if __name__ == "__main__":
    main()
