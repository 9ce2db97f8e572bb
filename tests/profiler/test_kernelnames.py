"""Names of kernels as Kineto writes them, and what each is; nothing is made of a name that is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.profiler.effects.kernelnames import (
    NAME_LENGTH,
    PATTERNS,
    TOP_KERNELS,
    AttentionKernel,
    kinds_of,
    recognise,
)
from llmtop.profiler.record.events import KernelTime

FLASH_2 = (
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, "
    "false, cutlass::bfloat16_t, Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, "
    "false, true, false, false, true, true, false, false>(flash::Flash_fwd_params)"
)
FLASH_2_BACKWARD = (
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, "
    "2, false, false, cutlass::bfloat16_t>, false, true>(flash::Flash_bwd_params)"
)
TORCH_FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false, "
    "false, cutlass::bfloat16_t> >(pytorch_flash::Flash_fwd_params)"
)
FLASH_3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> > > > > >(flash::Params)"
)
FLASH_4 = (
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__"
    "tensor0000o11101213_tensor0000o11101213_0"
)
EFFICIENT = (
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, "
    "cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)"
)
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1"
SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, "
    "at::native::(anonymous namespace)::SoftMaxForwardEpilogue>(float*, float const*, int)"
)
LOG_SOFTMAX = SOFTMAX.replace("::SoftMaxForwardEpilogue", "::LogSoftMaxForwardEpilogue")
WARP_SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>"
    "(float*, float const*, int, int, int, bool const*, int, bool)"
)
WARP_LOG_SOFTMAX = WARP_SOFTMAX.replace("10, false", "10, true")
FUSED_ADAM = (
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, long>, float, float, float, "
    "float, float, float, adamMode_t, float>(long, int volatile*, TensorListMetadata<4>, AdamFunctor<float>)"
)
TORCH_FUSED_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false> >()"
)
FOREACH_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListScalarListMetadata<float, 3>, at::native::(anonymous namespace)::PointwiseOpScalarListFunctor<"
    "float, 3, 3, 0>, std::divides<float> >()"
)
FOREACH_NORM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, "
    "(at::native::NormType)1> >()"
)

KNOWN: list[tuple[str, dict[str, str]]] = [
    (FLASH_2, {"attention": "flash_attention_2"}),
    (FLASH_2_BACKWARD, {"attention": "flash_attention_2"}),
    (TORCH_FLASH, {"attention": "sdpa_flash"}),
    (FLASH_3, {"attention": "flash_attention_3"}),
    (FLASH_3.replace("FlashAttnFwdSm90", "FlashAttnBwdSm90"), {"attention": "flash_attention_3"}),
    (FLASH_4, {"attention": "flash_attention_4"}),
    (EFFICIENT, {"attention": "sdpa_efficient"}),
    (EFFICIENT.replace("fmha_cutlassF", "fmha_cutlassB"), {"attention": "sdpa_efficient"}),
    (CUDNN, {"attention": "sdpa_cudnn"}),
    (SOFTMAX, {"attention": "unfused"}),
    (WARP_SOFTMAX, {"attention": "unfused"}),
    (LOG_SOFTMAX, {"loss": "torch_cross_entropy"}),
    (WARP_LOG_SOFTMAX, {}),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", {"attention": "sdpa_flash_cpu"}),
    ("aten::_scaled_dot_product_attention_math", {"attention": "sdpa_math"}),
    ("aten::_softmax", {"attention": "unfused"}),
    ("aten::_log_softmax", {}),
    ("_rms_norm_forward_kernel", {"liger": "rms_norm"}),
    ("_block_rms_norm_backward_kernel", {"liger": "rms_norm"}),
    ("_layer_norm_backward_kernel", {"liger": "layer_norm"}),
    ("_triton_rope", {"liger": "rope"}),
    ("_swiglu_forward_kernel", {"liger": "glu"}),
    ("_swiglu_backward_kernel_tiled", {"liger": "glu"}),
    ("_geglu_tanh_forward_kernel", {"liger": "glu"}),
    ("liger_cross_entropy_kernel", {"liger": "cross_entropy", "loss": "liger_cross_entropy"}),
    (FUSED_ADAM, {"optimizer": "deepspeed_fused_adam"}),
    (TORCH_FUSED_ADAM, {"optimizer": "torch_fused_adam"}),
    (FOREACH_ADAM, {"optimizer": "torch_foreach_adam"}),
    (FOREACH_NORM, {}),
    (
        "void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 3, 256, 1>(__nv_bfloat16*, __nv_bfloat16*)",
        {"optimizer": "bitsandbytes_8bit"},
    ),
    ("void kOptimizer32bit2State<float, 3>(float*, float*, float*)", {"optimizer": "bitsandbytes_32bit"}),
    ("Optimizer.step#DeepSpeedCPUAdam.step", {"optimizer": "deepspeed_cpu_adam"}),
    (
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*)",
        {"quantization": "4bit_dequantize"},
    ),
    ("void kDequantizeBlockwise<float, 512, 64, 8, 0>(float*, unsigned char*, float*, float*, int)", {}),
    ("void kInt8VectorQuant<__half, 1024, 0>(__half*, float*)", {"quantization": "int8_matmul"}),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", {"communication": "all_gather"}),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", {"communication": "reduce_scatter"}),
    ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgs)", {"communication": "all_reduce"}),
    ("ncclDevKernel_Reduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", {"communication": "reduce"}),
    ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", {"communication": "all_gather"}),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", {"communication": "send_recv"}),
    ("c10d::allreduce_", {"communication": "all_reduce"}),
    ("c10d::_allgather_base_", {"communication": "all_gather"}),
    ("c10d::reduce_", {"communication": "reduce"}),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", {}),
    ("nvjet_tst_256x160_64x5_2x1_2cta_v_bz_TNT", {}),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)", {}),
    ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_0", {}),
    ("Memcpy HtoD (Pinned -> Device)", {}),
]


@pytest.mark.parametrize(("name", "kinds"), KNOWN, ids=[name[:60] for name, _ in KNOWN])
def test_a_name_is_known_for_what_it_is_and_for_nothing_else(name: str, kinds: dict[str, str]) -> None:
    assert dict(kinds_of(name)) == kinds


def test_every_row_says_where_its_names_are_written() -> None:
    assert all(row.source for row in PATTERNS)


def times(*names: str, calls: int = 1) -> list[KernelTime]:
    return [KernelTime(name=name, seconds=1.0 / (at + 1), calls=calls) for at, name in enumerate(names)]


def test_attention_is_the_fused_kernel_even_beside_a_routers_softmax() -> None:
    assert recognise(3, times(SOFTMAX, TORCH_FLASH)).attention == AttentionKernel.SDPA_FLASH
    assert recognise(3, times(SOFTMAX, "gemm")).attention == AttentionKernel.UNFUSED
    assert recognise(3, times(LOG_SOFTMAX, "gemm")).attention is None
    math = times("aten::_softmax", "aten::_scaled_dot_product_attention_math")
    assert recognise(3, math).attention == AttentionKernel.SDPA_MATH


def test_forward_passes_of_attention_are_counted_alone() -> None:
    other = FLASH_2_BACKWARD.replace("dq_dk_dv", "convert_dq")
    seen = recognise(3, times(FLASH_2, FLASH_2_BACKWARD, other, calls=8))
    assert seen.attention_calls == 8


def test_a_loss_kernel_that_runs_chunk_by_chunk_is_the_fused_linear_one() -> None:
    fused = recognise(3, times("liger_cross_entropy_kernel", "_rms_norm_forward_kernel", calls=8))
    assert fused.liger == ("fused_linear_cross_entropy", "rms_norm")
    assert fused.loss == "liger_fused_linear_cross_entropy"
    single = recognise(3, times("liger_cross_entropy_kernel"))
    assert (single.liger, single.loss) == (("cross_entropy",), "liger_cross_entropy")


@given(st.lists(st.tuples(st.text(max_size=400), st.floats(0, 10), st.integers(1, 99)), max_size=60))
def test_what_is_kept_is_bounded_and_ordered(found: list[tuple[str, float, int]]) -> None:
    kernels = [KernelTime(name=name, seconds=seconds, calls=calls) for name, seconds, calls in found]
    seen = recognise(3, kernels)
    assert len(seen.top) == min(TOP_KERNELS, len(kernels))
    assert [k.seconds for k in seen.top] == sorted((k.seconds for k in kernels), reverse=True)[:TOP_KERNELS]
    assert all(len(kernel.name) <= NAME_LENGTH for kernel in seen.top)
    assert seen.total_seconds == pytest.approx(sum(kernel.seconds for kernel in kernels))
