"""Bytes of logits and loss: the plain path of transformers, and Liger's two cross-entropies."""

from __future__ import annotations

from math import ceil

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.sizes import Sizes


class LossBytes(Struct, frozen=True, kw_only=True):
    """Bytes for the whole micro-batch."""

    kept: int
    """Alive between forward and backward, the head's own gradient not included."""
    forward_peak: int
    """Alive at the worst point of computing the loss, `kept` included."""
    backward_peak: int
    """Alive at the worst point of its backward."""
    head_gradient: int
    """The head's gradient where the forward already makes it (Liger); 0 otherwise."""
    reads_head: bool = False
    """Whether the loss multiplies by the head itself (Liger), which is not the loss's own module."""
    peak_activations: int = 0
    """Of the worst point of all: the gradient of the head's input, which Liger's fused loss keeps."""
    peak_workspace: int = 0
    """The same for what nobody keeps: the head's input, gone after the forward pass of that loss."""

    @property
    def peak_logits(self) -> int:
        """Of the worst point of all: the logits, their gradient and copies of both."""
        worst = max(self.forward_peak, self.backward_peak)
        return worst - self.peak_activations - self.peak_workspace


def liger_chunk_tokens(tokens: int, vocab: int, hidden: int) -> int:
    """Tokens of one chunk of the fused loss: the next power of two of tokens / ceil(vocab / hidden).

    liger-kernel 0.8.5, `ops/fused_linear_cross_entropy.py:fused_linear_cross_entropy_forward`.
    """
    increase = ceil(vocab / hidden)
    per_chunk = ceil(tokens / increase)
    return min(tokens, 1 << (per_chunk - 1).bit_length())


def loss_bytes(spec: RunSpec, sizes: Sizes) -> LossBytes:
    """Logits are counted for every token: the loss shifts labels, not logits."""
    model, width, tokens = spec.model, sizes.dtype_bytes, sizes.tokens
    vocab, hidden = model.vocab_size, model.hidden_size
    if "fused_linear_cross_entropy" in sizes.liger:
        chunk = liger_chunk_tokens(tokens, vocab, hidden)
        input_gradient = hidden * width * tokens
        head_gradient = sizes.head_params * width if sizes.head_trained else 0
        forward = chunk * vocab * width + 2 * input_gradient
        return LossBytes(
            kept=input_gradient,
            forward_peak=forward,
            backward_peak=input_gradient,
            head_gradient=head_gradient,
            reads_head=True,
            peak_activations=input_gradient,
            peak_workspace=input_gradient,
        )
    elements = tokens * vocab
    softcap = elements * width if model.logit_softcap else 0
    # fp32 copy of the logits, log-softmax in fp32, and the logits themselves; the copy is the logits in fp32.
    upcast = 4 if width != 4 else 0
    if "cross_entropy" in sizes.liger:
        # `ForCausalLMLoss` upcasts first; Liger (`ops/cross_entropy.py`) then writes the gradient over that
        # copy and keeps it, and backward casts it down beside it.
        return LossBytes(
            kept=4 * elements + softcap,
            forward_peak=(width + upcast) * elements + softcap,
            backward_peak=(4 + (width if upcast else 0)) * elements + softcap,
            head_gradient=0,
        )
    # transformers 5.x `loss/loss_utils.py:ForCausalLMLoss`: kept is the log-softmax; its backward makes
    # the dense gradient of the negative log-likelihood and that of the log-softmax: 12 bytes a logit.
    return LossBytes(
        kept=4 * elements + softcap,
        forward_peak=(width + upcast + 4) * elements + softcap,
        backward_peak=12 * elements + softcap,
        head_gradient=0,
    )
