"""What chooses the experts of each token.

After transformers 5.24 `models/{mixtral,qwen2_moe,qwen3_moe,deepseek_v2,deepseek_v3}`.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.layers import Frame, Kept
from llmtop.profiler.memory.tape.machine import Tensor

_PLACE_BYTES = 8
"""Of one place in an order."""


class RoutingForm(Struct, frozen=True):
    """How a family's code chooses experts."""

    wide: bool
    """Its input and weight are cast to fp32 before the product."""
    sigmoid: bool
    """Scores are sigmoids, corrected and masked in copies (DeepSeek-V3); else a softmax."""
    wide_weights: bool
    """The chosen scores stay in fp32, and with them what they are multiplied with."""
    fused_cast: bool
    """The softmax casts fp16 by itself."""
    groups: int = 0
    """Of experts, of which some are masked by their best two."""


class Routed(Struct, frozen=True):
    """What a router gives; all of it lives until the block's code ends."""

    logits: Tensor
    places: Tensor
    """The chosen experts of each token."""
    weights: Tensor


class Router:
    """Scores of all experts for each token, and the best of them."""

    def __init__(
        self,
        frame: Frame,
        *,
        experts: int,
        chosen: int,
        columns: int,
        trained: bool,
        form: RoutingForm,
        slot: int,
    ) -> None:
        self.frame, self.trained, self.form, self.slot = frame, trained, form, slot
        self.elements = experts * columns
        tokens = frame.tokens
        self.in_bytes, self.wide_in_bytes = tokens * columns * frame.width, 4 * tokens * columns
        self.score_bytes, self.wide_score_bytes = tokens * experts * frame.width, 4 * tokens * experts
        self.place_bytes = _PLACE_BYTES * tokens * chosen
        self.weight_bytes = (4 if form.wide_weights else frame.width) * tokens * chosen
        self.casts_input = form.wide and frame.width != 4
        self.narrow_logits = frame.width != 4 and not form.wide

    def forward(self, x: Tensor) -> tuple[Routed, list[Kept]]:
        machine, frame = self.frame.machine, self.frame
        if frame.gathering is not None:
            frame.gathering.fetch(self.slot)
        logits, of_logits = self._logits(x)
        scores = self._scores(logits)
        of_scores = frame.save(scores)
        corrected = self._corrected() if self.form.sigmoid else ()
        places = machine.new(self.place_bytes)
        weights = machine.new(self.weight_bytes)
        of_places = frame.save(places)
        machine.drop_all(*corrected, scores)
        if frame.gathering is not None:
            frame.gathering.release(self.slot)
        return Routed(logits, places, weights), [of_logits, of_scores, of_places]

    def _logits(self, x: Tensor) -> tuple[Tensor, Kept]:
        machine, save = self.frame.machine, self.frame.save
        if not self.casts_input:
            logits = machine.new(self.score_bytes)
            machine.multiply()
            return logits, save(x) if self.trained else ()
        wide, weight = machine.new(self.wide_in_bytes), machine.new(4 * self.elements)
        logits = machine.new(self.wide_score_bytes)
        machine.multiply()
        kept = save(weight, wide) if self.trained else save(weight)
        machine.drop_all(wide, weight)
        return logits, kept

    def _scores(self, logits: Tensor) -> Tensor:
        machine = self.frame.machine
        casts = self.narrow_logits and not self.form.fused_cast
        wide = machine.new(self.wide_score_bytes) if casts else None
        return machine.made_from(wide, self.wide_score_bytes)

    def _corrected(self) -> tuple[Tensor, ...]:
        """Copies of the scores with some groups masked, which are gone when the choice is made."""
        machine = self.frame.machine
        corrected = machine.new(self.wide_score_bytes)
        best = machine.new(2 * _PLACE_BYTES * self.frame.tokens * self.form.groups)
        mask = machine.new(self.wide_score_bytes)
        masked = machine.made_from(corrected, self.wide_score_bytes)
        return masked, best, mask

    def backward(self, kept: list[Kept]) -> Tensor:
        """From the gradient of the chosen scores, which is small, to that of the input."""
        machine, frame = self.frame.machine, self.frame
        of_logits, of_scores, of_places = kept
        spread = machine.new(self.wide_score_bytes)
        machine.drop_all(*of_places)
        scores = machine.new(self.score_bytes if self.form.fused_cast else self.wide_score_bytes)
        machine.drop_all(spread, *of_scores)
        if self.narrow_logits and not self.form.fused_cast:
            scores = machine.made_from(scores, self.score_bytes)
        if frame.gathering is not None:
            frame.gathering.fetch(self.slot)
        weight, of_input = self._products()
        machine.drop_all(scores, *of_logits)
        if self.casts_input and weight is not None:
            weight = machine.made_from(weight, self.elements * frame.width)
        if frame.gathering is not None:
            frame.gathering.release(self.slot)
        if weight is not None:
            frame.ready(self.elements, weight)
        if self.casts_input:
            of_input = machine.made_from(of_input, self.in_bytes)
        return of_input

    def _products(self) -> tuple[Tensor | None, Tensor]:
        """The gradients of weight and input, as wide as they were multiplied."""
        machine, width = self.frame.machine, 4 if self.casts_input else self.frame.width
        input_bytes = self.wide_in_bytes if self.casts_input else self.in_bytes
        first = machine.new(input_bytes) if self.frame.by_function else None
        weight = machine.new(self.elements * width) if self.trained else None
        machine.multiply()
        return weight, first if first is not None else machine.new(input_bytes)
