"""A model and an engine for a run spec: which layers, of which sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.memory.blocks import FP32_NORMALIZED, POST_NORM, masked_blocks
from llmtop.profiler.memory.lora import adapted
from llmtop.profiler.memory.mask import mask_bytes
from llmtop.profiler.memory.mlp import PYTHON_GELU
from llmtop.profiler.memory.secondary import second_ranks
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.tape.attending import attention, kernel
from llmtop.profiler.memory.tape.attention import Attention, Heads, Kernel
from llmtop.profiler.memory.tape.blocks import Block, GatedMlp, JoinedMlp, Places, PlainMlp
from llmtop.profiler.memory.tape.layers import Frame, FusedNorm, Linear, Norm, RmsNorm
from llmtop.profiler.memory.tape.loss import ChunkedLoss, Loss, PlainLoss
from llmtop.profiler.memory.tape.machine import Machine, Tensor
from llmtop.profiler.memory.tape.model import Embedding, Model
from llmtop.profiler.memory.tape.plan import GatherRules, Plan, StepRules
from llmtop.profiler.memory.tape.stage3 import HEAD, Coordinator, Stage3, Weight
from llmtop.profiler.memory.tape.weights import STORED, is_packed, of_block, weights_of

if TYPE_CHECKING:
    from llmtop.profiler.memory.tape.blocks import Attending, Mlp
    from llmtop.profiler.memory.tape.engine import Engine

_BITS = {"none": 16, "int8": 8, "nf4": 4}
FAMILIES = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
        "gemma",
        "gemma2",
        "gpt2",
        "bloom",
        "gpt_neox",
        "phi3",
        "opt",
        "olmo2",
        "glm",
        "glm4",
        "granite",
        "gemma3_text",
        "starcoder2",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
    }
)
"""Those whose blocks are of the forms that this package has."""


_WEIGHT_SECOND = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Families whose norms multiply by their weight from the right."""
_SCALED_EMBEDDING = _WEIGHT_SECOND | {"granite"}


def is_covered(spec: RunSpec) -> bool:
    """Whether the order of allocations is known."""
    options = spec.options
    return (
        not spec.on_cpu
        and spec.model.family in FAMILIES
        and options.qat == "none"
        and "nvme" not in (options.offload_optimizer, options.offload_param)
        and second_ranks(spec) == 1
        and not (spec.model.family == "bloom" and (spec.model.dropout or options.attention != "eager"))
        and not masked_blocks(spec)  # whose keys and masks are copied for the kernel
    )


class _Matrix(Struct, frozen=True):
    name: str
    elements: int
    bytes: int


class Builder:
    """The parts of one model, made on one machine."""

    def __init__(
        self,
        spec: RunSpec,
        sizes: Sizes,
        machine: Machine,
        engine: Engine | Stage3,
        *,
        watched: bool = True,
    ) -> None:
        """`watched`: what is saved for the backward pass is counted, as it is in a run's first steps."""
        self.spec, self.sizes, self.machine, self.watched = spec, sizes, machine, watched
        self.shape: ModelShape = spec.model
        self.slots: dict[str, int] = {}
        """Of the matrices of the block that is being made, by name."""
        names = adapted(self.shape, spec.options.lora_targets) if sizes.lora_rank else ()
        self.adapted = {group.name for group in names}
        self.coordinator = self._coordinator(engine) if isinstance(engine, Stage3) else None
        self.frame = Frame(
            machine,
            engine.ready,
            sizes.tokens,
            sizes.dtype_bytes,
            [True],
            spec.options.precision != "fp16",
            self.coordinator,
            [] if spec.options.quantization != "none" else None,
            by_function=sizes.stage == 3 and spec.options.quantization == "none",
        )
        self.full = sizes.lora_rank == 0

    def _coordinator(self, engine: Stage3) -> Coordinator | None:
        """What gathers weights; one rank has all of them."""
        if engine.plan.ranks == 1 and not engine.plan.params_away:
            return None
        shape, sizes = self.shape, self.sizes
        head = sizes.head_params * sizes.dtype_bytes
        weights = [Weight(0, sizes.head_params, head)]
        starts = []
        for layer in range(shape.num_layers):
            starts.append(len(weights))
            for matrix in self._matrices(layer):
                weights.append(Weight(len(weights), matrix.elements, matrix.bytes))
        if not shape.tied_embeddings:
            weights.append(Weight(len(weights), sizes.head_params, head))
        engine.coordinator = Coordinator(engine.machine, engine.plan, weights, starts)
        return engine.coordinator

    def _matrices(self, layer: int) -> Iterator[_Matrix]:
        """What ZeRO-3 shards of a block, each matrix before its two adapters."""
        packed, width = STORED[self.spec.options.quantization], self.sizes.dtype_bytes
        rank = self.sizes.lora_rank
        for group in of_block(self.shape, layer):
            if len(group.shape) < 2:
                continue
            each = packed if packed is not None and is_packed(group) else width
            yield _Matrix(group.name, group.numel, round(group.numel * each))
            if rank and group.name in self.adapted:
                for side in (group.shape[1], group.shape[0]):
                    yield _Matrix(f"{group.name}.adapter", rank * side, rank * side * width)

    def slot(self, name: str) -> int:
        return self.slots.get(name, 0)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        return Linear(
            self.frame,
            rows,
            columns,
            bias=bias,
            trained=self.full,
            rank=self.sizes.lora_rank if name in self.adapted else 0,
            bits=_BITS[self.spec.options.quantization],
            slot=self.slot(name),
        )

    def norm(self, columns: int, *, rows: int = 1) -> Norm:
        shape, liger = self.shape, self.sizes.liger
        fused = ("rms_norm" if shape.norm == "rms" else "layer_norm") in liger
        if shape.norm == "layer" or fused:
            in_place = fused and shape.norm == "rms"
            return FusedNorm(self.frame, columns, trained=self.full, in_place=in_place, rows=rows)
        wide = shape.family in FP32_NORMALIZED
        first = shape.family in _WEIGHT_SECOND
        return RmsNorm(
            self.frame, columns, trained=self.full, rows=rows, fp32_weight=wide, weight_first=first
        )

    def attention(self) -> Attending:
        if self.shape.mla is not None:
            from llmtop.profiler.memory.tape.special import latent_attention  # most models have none

            return latent_attention(self, self.shape.mla)
        return attention(self)

    def kernel(self, heads: Heads) -> Kernel:
        return kernel(self, heads)

    def mlp(self, layer: int) -> Mlp:
        shape = self.shape
        hidden, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        if shape.moe is not None and layer >= shape.moe.first_dense_layers:
            from llmtop.profiler.memory.tape.special import experts_mlp  # most models have none

            return experts_mlp(self, shape.moe)
        if shape.fused_gate_up:
            return JoinedMlp(
                self.frame,
                joined=self.linear("gate_up_proj", 2 * inner, hidden, bias=bias),
                down=self.linear("down_proj", hidden, inner, bias=bias),
                fused="glu" in self.sizes.liger,
            )
        if shape.gated_mlp:
            return self.gated_mlp(inner)
        up = self.linear("up_proj", inner, hidden, bias=bias)
        down = self.linear("down_proj", hidden, inner, bias=bias)
        if shape.family == "bloom":
            from llmtop.profiler.memory.tape.bloom import BloomMlp  # most models have none

            return BloomMlp(self.frame, up=up, down=down)
        return PlainMlp(
            self.frame,
            up=up,
            down=down,
            python_gelu=shape.activation in PYTHON_GELU,
            in_place=shape.activation == "relu",
            inline=shape.family == "opt",
        )

    def gated_mlp(self, inner: int, prefix: str = "") -> GatedMlp:
        shape = self.shape
        hidden, bias = shape.hidden_size, shape.mlp_bias
        return GatedMlp(
            self.frame,
            gate=self.linear(f"{prefix}gate_proj", inner, hidden, bias=bias),
            up=self.linear(f"{prefix}up_proj", inner, hidden, bias=bias),
            down=self.linear(f"{prefix}down_proj", hidden, inner, bias=bias),
            fused="glu" in self.sizes.liger,
        )

    def _norms(self) -> Places:
        """Of one block."""
        shape = self.shape
        made = [self.norm(shape.hidden_size) for _ in range(shape.norms_per_layer)]
        if len(made) == 4:
            return Places(*made)
        if shape.family in POST_NORM:
            return Places(after_attention=made[0], after_mlp=made[1])
        return Places(before_attention=made[0], before_mlp=made[1] if len(made) > 1 else None)

    def _block(self, layer: int) -> Block:
        shape, sizes = self.shape, self.sizes
        attention, mlp, norms = self.attention(), self.mlp(layer), self._norms()
        hidden_bytes = sizes.tokens * shape.hidden_size * sizes.dtype_bytes
        if shape.family in POST_NORM:
            from llmtop.profiler.memory.tape.postnorm import PostNormBlock  # most models have none

            assert isinstance(attention, Attention) and isinstance(mlp, GatedMlp)
            return PostNormBlock(
                self.frame, norms=norms, attention=attention, mlp=mlp, hidden_bytes=hidden_bytes
            )
        kind = Block
        if shape.family == "bloom":
            from llmtop.profiler.memory.tape.bloom import BloomBlock  # most models have none

            kind = BloomBlock
        return kind(
            self.frame,
            norms=norms,
            attention=attention,
            mlp=mlp,
            hidden_bytes=hidden_bytes,
            parallel=shape.parallel_block,
            dropout=bool(shape.dropout) and not shape.parallel_block,
            viewed=shape.family == "opt",
            scaled=shape.family == "granite",
            holds_attended=shape.family == "gpt2",
        )

    def _blocks(self) -> list[Block]:
        """All that are alike are one object: between its passes a block remembers nothing."""
        shape = self.shape
        dense = shape.moe.first_dense_layers if shape.moe is not None else 0
        made: list[Block] = []
        for layer in sorted({0, dense} if 0 < dense < shape.num_layers else {0}):
            self.slots = {}
            for slot, matrix in enumerate(self._matrices(layer)):
                self.slots.setdefault(matrix.name, slot)
            made.append(self._block(layer))
        return [made[0]] * (shape.num_layers if len(made) == 1 else dense) + made[1:] * (
            shape.num_layers - dense
        )

    def model(self) -> Model:
        shape, sizes = self.shape, self.sizes
        width, hidden = sizes.dtype_bytes, shape.hidden_size
        model: Model

        def hold_head(elements: int, gradient: Tensor) -> None:
            model.hold_head(elements, gradient)

        head_frame = replace(self.frame, ready=hold_head)
        head = Linear(head_frame, shape.vocab_size, hidden, trained=self.full, slot=HEAD)
        loss: Loss
        if "fused_linear_cross_entropy" in sizes.liger:
            loss = ChunkedLoss(head_frame, head, sharded=sizes.stage == 3, watched=self.watched)
        else:
            capped = bool(shape.logit_softcap)
            scaled = shape.family == "granite"
            loss = PlainLoss(
                head_frame, head, capped=capped, fused="cross_entropy" in sizes.liger, scaled=scaled
            )
        embedded = sizes.head_params
        model = Model(
            self.frame,
            embedding=Embedding(
                elements=embedded,
                weight_bytes=embedded * width,
                hidden_bytes=sizes.tokens * hidden * width,
                trained=self.full,
                tied=shape.tied_embeddings,
                positions=bool(shape.learned_positions),
                scaled=shape.family in _SCALED_EMBEDDING,
            ),
            blocks=self._blocks(),
            embedding_norm=self.norm(hidden) if shape.embedding_norm else None,
            final_norm=self.norm(hidden) if shape.final_norm else None,
            loss=loss,
            constant_bytes=self._positions_bytes(),
            mask_bytes=mask_bytes(self.spec, sizes),
            checkpoint_every=sizes.checkpoint_every,
            reentrant=self.spec.options.checkpointing_reentrant,
            at_block=self.coordinator.at_block if self.coordinator is not None else None,
        )
        return model

    def _positions_bytes(self) -> int:
        """Cosines and sines, or complex numbers in their place (DeepSeek-V2); Gemma-3 has two of each."""
        shape, width = self.shape, self.sizes.dtype_bytes
        if shape.learned_positions:
            return 0
        if shape.family == "bloom":  # slopes
            return self.sizes.tokens * shape.num_heads * width
        if shape.mla is None:
            kinds = 2 if shape.family == "gemma3_text" else 1
            return kinds * 2 * shape.head_dim * width * self.sizes.seq_len
        each = 4 if shape.family == "deepseek_v2" else 2 * width
        return each * shape.mla.qk_rope_head_dim * self.sizes.seq_len


def engine_plan(spec: RunSpec, sizes: Sizes, rank: int) -> Plan:
    """What the engine of one rank goes by."""
    options = spec.options
    trained, frozen = weights_of(spec, sizes)
    return Plan(
        stage=sizes.stage,
        ranks=sizes.ranks,
        width=sizes.dtype_bytes,
        trained=trained,
        tied=spec.model.tied_embeddings,
        packed=options.quantization != "none",
        frozen_bytes=frozen,
        rank=rank,
        share=sizes.shard,
        bucket=sizes.zero.reduce_bucket_size,
        overlap=sizes.zero.overlap_comm,
        offloaded=options.offload_optimizer != "none",
        params_away=options.offload_param != "none",
        accumulating=options.grad_accum > 1,
        contiguous=sizes.zero.contiguous_gradients,
        sub_group=sizes.zero.sub_group_size,
        rules=_rules(spec),
        gathering=GatherRules(
            max_live=sizes.zero.max_live_parameters,
            max_reuse=sizes.zero.max_reuse_distance,
            prefetch_bucket=sizes.zero.prefetch_bucket_size,
            persistent=sizes.zero.param_persistence_threshold,
        ),
    )


def _rules(spec: RunSpec) -> StepRules:
    kind = spec.options.optimizer
    fused = kind == "adamw"
    temporary = 4 if kind == "adamw_torch" else 0
    if spec.options.offload_optimizer != "none" or kind == "paged_adamw_32bit":
        return StepRules(0.0, 0.0, temporary, fused)
    if kind in ("adamw_8bit", "paged_adamw_8bit"):
        return StepRules(1.0 if kind == "adamw_8bit" else 0.0, 4 / 256, temporary, fused)
    return StepRules(4.0, 0.0, temporary, fused)
