"""A model that computes with one module's weights in memory at a time, read from where they lie.

Its own code runs, on a skeleton without memory: each module that has parameters gets them as it is called and
loses them when it returns. Of the embedding only the rows of the text are read, and the projection to logits
is computed in pieces of its rows.
"""

from __future__ import annotations

from typing import Any

import torch

from llmtop.trainer.worker.packing.unpacking import Numbers

_HEAD_BYTES = 64 << 20
"""Of the projection's weights at a time."""


class StreamedModel:
    """A causal language model of transformers, made of its configuration and of numbers elsewhere."""

    def __init__(self, skeleton: Any, numbers: Numbers, device: torch.device, logits_bytes: int) -> None:
        """`skeleton` has no memory (`worker.stream.skeleton_of`); it is this model's from now on.

        Logits of so many tokens at a time are computed as take at most `logits_bytes`, in 32 bits.
        """
        self._numbers, self._device = numbers, device
        self._model = skeleton.eval()
        self._trunk = skeleton.base_model
        self._dtype: torch.dtype = skeleton.dtype
        self._tokens = max(1, logits_bytes // (4 * skeleton.config.vocab_size))
        names = {id(module): name for name, module in skeleton.named_modules()}
        head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
        self._embedding_name = f"{names[id(embedding)]}.weight"
        self._head_name = f"{names[id(head)]}.weight"
        if self._head_name not in numbers:
            self._head_name = self._embedding_name
        _make_buffers(skeleton, device)
        embedding.padding_idx = None  # a row of the whole table
        embedding.register_forward_pre_hook(self._give_rows)
        self._bias = _parameter(head, "bias")
        if self._bias is not None:
            self._bias = torch.empty_like(self._bias, device=device)
            numbers.fill(f"{names[id(head)]}.bias", self._bias)
        head.forward = self._project
        for name, module in skeleton.named_modules():
            if module not in (head, embedding) and module._parameters:
                self._lend(name, module)

    @torch.inference_mode()
    def nats(self, ids: torch.Tensor) -> list[float]:
        """Of each row of tokens, all equally long: summed negative logarithms of what each was given."""
        ids = ids.to(self._device)
        hidden = self._trunk(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return [self._nats(states, row[1:]) for states, row in zip(hidden, ids, strict=True)]

    def _nats(self, hidden: torch.Tensor, targets: torch.Tensor) -> float:
        total = 0.0
        for first in range(0, len(targets), self._tokens):
            after = first + self._tokens
            logits = self._logits(hidden[None, first:after])[0].float()
            total += float(torch.nn.functional.cross_entropy(logits, targets[first:after], reduction="sum"))
        return total

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the model's own code, softcaps and all: its trunk answers with what is known already."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        forward = self._trunk.forward
        self._trunk.forward = lambda *words, **keys: MoeModelOutputWithPast(last_hidden_state=hidden)
        try:
            unused = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self._device)
            found: torch.Tensor = self._model(input_ids=unused, use_cache=False).logits
        finally:
            self._trunk.forward = forward
        return found

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, width = int(self._model.config.vocab_size), hidden.shape[-1]
        found = torch.empty((*hidden.shape[:-1], rows), dtype=self._dtype, device=self._device)
        at_a_time = max(1, _HEAD_BYTES // (4 * width))
        for first in range(0, rows, at_a_time):
            which = torch.arange(first, min(first + at_a_time, rows))
            weights = self._numbers.rows(self._head_name, which).to(self._device, self._dtype)
            found[..., first : first + len(which)] = torch.nn.functional.linear(hidden, weights)
        return found if self._bias is None else found.add_(self._bias)

    def _give_rows(self, module: Any, words: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The embedding as a table of the tokens that are asked for, which are numbered anew."""
        ids, *more = words
        used, numbered = torch.unique(ids, return_inverse=True)
        rows = self._numbers.rows(self._embedding_name, used.cpu()).to(self._device, self._dtype)
        module.weight = torch.nn.Parameter(rows, requires_grad=False)
        return (numbered, *more)

    def _lend(self, name: str, module: Any) -> None:
        """Memory for the module's own parameters while it is called, and for no longer."""
        nowhere = {key: value for key, value in module._parameters.items() if value is not None}

        def give(*_: object) -> None:
            for key, value in nowhere.items():
                filled = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                self._numbers.fill(f"{name}.{key}", filled)
                module._parameters[key] = torch.nn.Parameter(filled, requires_grad=False)

        def take_back(*_: object) -> None:
            module._parameters.update(nowhere)

        if nowhere:
            module.register_forward_pre_hook(give)
            module.register_forward_hook(take_back, always_call=True)


def _parameter(module: Any, key: str) -> torch.Tensor | None:
    found: torch.Tensor | None = module._parameters.get(key)
    return found


def _make_buffers(model: Any, device: torch.device) -> None:
    """Tables that no file holds, as of rotary positions, by the model's own code."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device=device)
    model.initialize_weights()
