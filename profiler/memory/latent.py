"""What latent attention (DeepSeek-V2 and -V3) does otherwise than attention with plain heads."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec


def latent_output_copied(spec: RunSpec) -> bool:
    """Whether what latent attention gives is put into rows for the last matrix.

    On Hopper SDPA is cuDNN's, which takes heads of up to 256 there and lays its output out as its queries
    lie: these come from a concatenation, head by head. Other devices and fp32 have the memory-efficient
    kernel, which gives rows.
    torch `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:check_cudnn_tensor_shapes`.
    """
    options = spec.options
    if options.attention != "sdpa":
        return options.attention != "eager"  # FlashAttention's output is cropped into rows
    return spec.gpu.compute_capability == "9.0" and options.precision != "fp32"
