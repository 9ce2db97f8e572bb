"""The structs that describe a run: model shape, hardware and options, frozen and strict.

`RunOptions` holds one field per option of the command line; a recipe TOML uses the same names.
`RunSpec` is the resolved whole that prediction, launch and every view read.

Annotations are evaluated here, and not put off: whoever reads a preset needs them, and msgspec would evaluate
each of them by itself, which takes ten times as long.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr, replace

SCHEMA_VERSION = 1

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]

Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["fp32", "fp16", "bf16"]
Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
Optimizer = Literal["adamw", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
Quantization = Literal["none", "int8", "nf4"]
Qat = Literal["none", "int8-int4", "int4-weight-only"]
LrSchedule = Literal["constant", "linear", "cosine"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
DTYPE_SPELLINGS: dict[str, tuple[str, ...]] = {
    "fp32": ("fp32", "float32", "torch.float32", "float"),
    "fp16": ("fp16", "float16", "torch.float16", "half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
"""How DeepSpeed files name a precision (deepspeed 0.19.8, `runtime/config.py:DtypeEnum`)."""


class MoeShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mixture-of-experts part of a block."""

    num_experts: PositiveInt
    experts_per_token: PositiveInt
    expert_intermediate_size: PositiveInt
    shared_intermediate_size: NonNegativeInt = 0
    """Total width of the always-on experts; 0 when there are none."""
    shared_gate: bool = False
    """A one-column gate in front of the shared expert (Qwen2-MoE)."""
    first_dense_layers: NonNegativeInt = 0
    """Layers that keep a dense MLP of `ModelShape.intermediate_size`: the leading ones in DeepSeek, every
    other one in Llama-4 Maverick."""
    router_bias: bool = False
    expert_bias: bool = False
    """Biases in the experts' matrices (gpt-oss)."""


class MlaShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek V2/V3)."""

    q_lora_rank: int | None
    """None: queries are projected directly."""
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


TensorRole = Literal["embedding", "position", "attention", "mlp", "expert", "router", "norm", "bias", "head"]


class TracedTensor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal weights of a traced model."""

    name: str
    """The module's within a block, or the model's own."""
    shape: tuple[int, ...]
    count: int
    """Over all blocks."""
    role: TensorRole
    per_layer: bool


class TracedCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one block of a traced model keeps for its backward, per token: the mean of all blocks."""

    attention: Literal["eager", "sdpa"]
    """`sdpa` stands for FlashAttention too, which keeps the same tensors."""
    width: Literal[2, 4]
    """Bytes of a number: 16 bits or 32."""
    adapters: bool
    """Whether all is frozen but adapters on every matrix of attention and MLP, not counting themselves."""
    from_length: NonNegativeInt
    """Sequences of at least so many tokens: a sliding window changes what is kept."""
    saved_bytes: int
    """For each token, whatever the length."""
    fixed_bytes: int
    """For each block, whatever the tokens."""
    saved_bytes_per_key: float
    """The same for each token of the sequence: scores, masks."""
    outside_bytes: int
    """Kept outside of all blocks for each token: the last norm and the head's input."""
    keeps_input: bool
    """Whether `saved_bytes` has the block's own input in it, which a checkpoint already holds."""


class Traced(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the modelling code of an architecture without formulas was seen to do (`presets.hf.tracing`)."""

    tensors: tuple[TracedTensor, ...]
    costs: tuple[TracedCost, ...]
    multiplied_weights: int
    """Weights that one token is multiplied with, of the chosen experts alone: half the forward's work."""
    attention_flops: float
    """Of the forward pass for a query and a key, over all heads: the mean of all blocks."""
    attentions: tuple[str, ...]
    """What the class says that it works with: `eager`, `sdpa`, `flash`."""
    versions: str
    """Of the packages that were traced, in words."""


class ModelShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A causal decoder-only transformer, as far as counting and memory need to know it."""

    name: str
    family: str
    """Hugging Face `model_type`; decides which modelling code the trainer builds."""
    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: NonNegativeInt
    """Width of the dense MLP; 0 when every layer is a mixture of experts."""
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_positions: PositiveInt | None = None
    """Longest sequence the model was made for; None when it does not say."""
    tied_embeddings: bool = False
    gated_mlp: bool = True
    """Three matrices (gate, up, down) or two."""
    fused_gate_up: bool = False
    """Gate and up are one matrix (Phi-3, GLM-4)."""
    fused_qkv: bool = False
    """Query, key and value are one matrix (GPT-2, GPT-NeoX, BLOOM, Falcon, Phi-3)."""
    activation: str = "silu"
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm has a weight; LayerNorm a weight and a bias."""
    norm_bias: bool = True
    """Whether a LayerNorm has its bias; ignored for RMSNorm."""
    norm_weight: bool = True
    """False for norms without any parameter (OLMo)."""
    norms_per_layer: NonNegativeInt = 2
    final_norm: bool = True
    parallel_block: bool = False
    """Attention and MLP read the same input and are added together (GPT-NeoX, Falcon, Phi-2)."""
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    """Norms on queries and keys: one shared by the heads (Qwen3), one over all heads (OLMo-2), or one for
    each head (Command R)."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: NonNegativeInt = 0
    """Rows of a learned position table; 0 for rotary or ALiBi."""
    embedding_norm: bool = False
    embedding_dim: PositiveInt | None = None
    """Width of the token embedding where it differs from the hidden size (OPT-350m): adds two projections."""
    attention_sinks: bool = False
    """One learned number per head (gpt-oss)."""
    sliding_window: PositiveInt | None = None
    logit_softcap: PositiveFloat | None = None
    attention_softcap: PositiveFloat | None = None
    dropout: NonNegativeFloat = 0.0
    """Of the hidden state, after attention and after the MLP. In records of before `score_dropout` the larger
    of both."""
    score_dropout: NonNegativeFloat | None = None
    """Of attention's scores; None in a record of before there was this field: a RunSpec fills it in."""
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    traced: Traced | None = None
    """Set for an architecture without formulas: its tensors and costs as they were seen. The other fields
    are then what its configuration says, as far as it says it."""


class MachineFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device was measured to reach at the shapes of one model (`llmtop calibrate`)."""

    date: str
    matmul_flops_per_second: PositiveFloat
    """Of the model's own matrices, forward and backward."""
    attention_flops_per_second: PositiveFloat
    """Forward and backward over the half of the square that causality leaves."""
    memory_bytes_per_second: PositiveFloat
    """Read and written by an elementwise operation."""
    loss_seconds_per_logit: PositiveFloat
    """Cross-entropy over fp32 logits, forward and backward."""
    optimizer_seconds_per_weight: PositiveFloat
    launch_seconds: PositiveFloat
    """Of the host for one operation of autograd, forward and backward."""
    pcie_bytes_per_second: PositiveFloat | None = None
    """From pinned memory; None on the CPU kind."""
    threads: PositiveInt | None = None
    """Of the one process that measured, on the CPU kind; None in figures of older versions."""


class GpuSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of accelerator. A figure that its maker does not publish is None."""

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bytes: PositiveInt | None = None
    """Device memory as NVML reports its total; for the CPU kind the machine's, read at resolve time."""
    memory_bandwidth_bytes_per_second: PositiveFloat | None = None
    dense_flops_per_second: dict[str, float] = {}
    """Dense (not sparse) peak by precision: keys fp32, tf32, fp16, bf16, fp8."""
    nvlink_bytes_per_second: PositiveFloat | None = None
    """Per direction, all links of one GPU together; None without NVLink."""
    pcie_bytes_per_second: PositiveFloat | None = None
    """Per direction."""
    network_bytes_per_second: PositiveFloat | None = None
    """Between nodes, per direction: the share of one GPU in the network cards of the system that its maker
    sells it in; None for GPUs that are sold without one."""
    compute_capability: Annotated[str, Meta(pattern=r"^\d{1,3}\.\d{1,3}$")] | None = None
    board_power_watts: PositiveFloat | None = None
    """What the whole board may draw: the limit that it is sold with."""
    torch_with_cuda: bool = False
    """CPU kind: ranks load a torch that was built with CUDA; read at resolve time."""
    measured: MachineFigures | None = None
    """Figures of this very machine, which win over the preset's; None without a calibration."""
    sources: dict[str, str] = {}
    """Field name to the document that the figure was read in."""


class RunOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every choice of a run; the command-line option of the same name sets it."""

    model: str
    """A model preset, a Hugging Face config.json, or a folder that holds one."""
    gpu: str = "auto"
    """A GPU preset; `auto` is what this machine has."""
    gpus: PositiveInt = 1
    """GPUs a node; on the CPU kind, processes."""
    nodes: PositiveInt = 1
    total_gpus: PositiveInt | None = None
    """Of all nodes together, where not every node has `gpus`: that is then the most that one has. None: gpus
    times nodes."""
    inter_node_gbps: PositiveFloat | None = None
    """Gigabits a second between nodes, each way: all network cards of one node together. None: as the GPU's
    preset has it."""
    zero: Annotated[int, Meta(ge=0, le=3)] = 2
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    nvme_path: str | None = None
    precision: Precision = "bf16"
    attention: Attention = "sdpa"
    liger: bool = False
    liger_kernels: str = "all"
    """`all`: what Liger switches on for the family; or words of `presets.liger.KERNELS` joined by commas."""
    gradient_checkpointing: bool = False
    checkpointing_reentrant: bool = False
    checkpointing_every: PositiveInt = 1
    """Layers 0, k, 2k, ... are recomputed in the backward pass, the others keep their activations."""
    optimizer: Optimizer = "adamw"
    quantization: Quantization = "none"
    lora_rank: NonNegativeInt = 0
    """0 trains every weight."""
    lora_alpha: PositiveFloat | None = None
    """None: twice the rank."""
    lora_targets: str = "all-linear"
    """`all-linear`, `attention`, `mlp`, or module names joined by commas."""
    qat: Qat = "none"
    """Fake quantization in training: of weights to int4, and of their inputs to int8 (dynamic, by token)."""
    qat_group: Annotated[int, Meta(ge=8)] = 32
    """Weights of a row that share one scale."""
    micro_batch: PositiveInt = 1
    grad_accum: PositiveInt = 1
    seq_len: Annotated[int, Meta(ge=2)] = 2048
    steps: PositiveInt = 100
    learning_rate: PositiveFloat = 2e-5
    lr_schedule: LrSchedule = "cosine"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradient clipping; 0 turns it off."""
    seed: NonNegativeInt = 0
    data: str = "builtin:english"
    """A text or JSONL file, a folder of them, a saved `datasets` folder, or Python's own English."""
    text_field: str = "text"
    """Field of a JSONL or datasets record that holds the text."""
    tokenizer: str = "auto"
    """A folder with a tokenizer; `auto`: the model's folder, else byte-level BPE of the data; `bytes`."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves only when asked to."""
    keep_checkpoints: NonNegativeInt = 0
    """How many of the newest stay, and the one that the run went on from; 0 keeps all."""
    save_at_end: bool = False
    classify_every: NonNegativeInt = 100
    """Steps between exact classifications of the engine's tensors; steps 1 and 2 are always classified."""
    kernel_profile_step: NonNegativeInt = 3
    """The step, counted from the start of the processes, in which rank 0 records the names of its kernels;
    0: never. A shorter run takes its last step; a classified step makes way to its neighbour."""
    heal: bool = False
    """Where memory runs out in a step, go on with half the micro-batch at the same global batch."""
    sample_seconds: PositiveFloat = 1.0
    hang_factor: PositiveFloat = 30.0
    """No step for this many times the median step counts as a hang."""
    hang_floor_seconds: PositiveFloat = 300.0
    """Never called a hang before this long without a step."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of a rank; 0 divides the machine's cores among the ranks."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON whose keys win over presets."""
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed keys, merged into the generated configuration last."""


class ValueSource(StrEnum):
    """Layers from weakest to strongest; a later one wins."""

    DEFAULT = "default"
    RECIPE = "recipe"
    DEEPSPEED_CONFIG = "deepspeed-config"
    COMMAND_LINE = "command line"
    MACHINE = "machine"


CHANGING_COMMANDS = ("llmtop set", "llmtop resume")
"""Which give a value after the launch; what is typed at a launch is an option or a `key=value`."""


class Provenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one option's value came from."""

    source: ValueSource
    detail: str = ""
    """The file, option text or probe that gave it."""


def changed_by(found: Provenance) -> str:
    """The command that changed a value after the launch, `llmtop set`; empty where none has."""
    return found.detail if found.detail in CHANGING_COMMANDS else ""


class Script(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training command of the user's own."""

    command: tuple[str, ...]
    folder: str
    """In which it runs."""
    described: bool = False
    """Whether the rest of the spec is what was seen of it. Until it has made its first step nothing is known
    of its model, which then has the family `UNSEEN`."""
    pid: int | None = None
    """Of a process that ran already: llmtop looks at it, and neither stops it nor leaves nothing of it."""


UNSEEN = "unseen"


def _score_dropout_of_before(model: ModelShape, config: dict[str, Any]) -> float:
    """By the rule that predictions had before shapes told of it; absent keys as in transformers 5.24."""
    if model.family in ("gpt2", "gpt_bigcode"):
        found = config.get("attn_pdrop", model.dropout)
    else:
        found = config.get("attention_dropout", 0.1 if model.family == "seed_oss" else 0.0)
    return float(found) if isinstance(found, int | float) and found > 0 else 0.0


class RunSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A resolved run: everything prediction and launch need, with nothing left to look up."""

    schema_version: int = SCHEMA_VERSION
    name: str
    """The recipe's name, or `custom`."""
    options: RunOptions
    model: ModelShape
    gpu: GpuSpec
    model_source: str
    """File that the model shape was read from."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The Hugging Face configuration to build the model from: the preset's or the file's own keys."""
    weights_dir: str | None = None
    """Folder with weights to start from; None trains from random weights."""
    provenance: dict[str, Provenance] = field(default_factory=dict)
    script: Script | None = None
    """The command that is run in place of llmtop's own trainer; None: its own."""

    def __post_init__(self) -> None:
        if self.model.score_dropout is None:
            found = _score_dropout_of_before(self.model, self.hf_config)
            force_setattr(self, "model", replace(self.model, score_dropout=found))

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.options.total_gpus or self.options.gpus * self.options.nodes

    @property
    def has_uneven_nodes(self) -> bool:
        """Whether some node has fewer GPUs than others."""
        return self.world_size != self.options.gpus * self.options.nodes

    @property
    def is_known(self) -> bool:
        """Whether model and options are what is trained: not before a script has been seen to train."""
        return self.script is None or self.script.described

    def knows(self, option: str) -> bool:
        """Whether an option's value is the run's own: of a script only what was seen of it is."""
        if self.script is None:
            return True
        found = self.provenance.get(option)
        return found is not None and found.source != ValueSource.DEFAULT

    @property
    def steps_planned(self) -> int | None:
        """Optimizer steps that the run is to make; None for a script, which alone knows."""
        return self.options.steps if self.script is None else None

    @property
    def saves_nothing(self) -> bool:
        """Whether it ends with nothing saved unless asked to. A script keeps its checkpoints itself."""
        return self.script is None and not self.options.checkpoint_every and not self.options.save_at_end

    @property
    def on_cpu(self) -> bool:
        return self.gpu.kind == "cpu"

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.options.micro_batch * self.options.grad_accum * self.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.options.seq_len
