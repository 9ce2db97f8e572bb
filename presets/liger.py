"""Liger's kernels by name: which a model family has, which are on by default, which a run asks for.

Read from liger-kernel 0.8.5, `transformers/monkey_patch.py`: the keyword arguments of each family's apply
function, and what the function does with them under transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

from llmtop.presets.errors import bad_value
from llmtop.presets.spec import RunSpec

ALL = "all"
ABOUT: dict[str, str] = {
    "rms_norm": "RMSNorm that keeps its input and no fp32 copies",
    "layer_norm": "LayerNorm in one kernel",
    "rope": "rotary positions, written in place",
    "glu": "SwiGLU or GeGLU that keeps gate and up alone",
    "relu_squared": "squared ReLU (Nemotron)",
    "cross_entropy": "loss whose gradient takes the place of the logits",
    "fused_linear_cross_entropy": "head and loss in pieces, without logits",
}
"""Each word of `liger_kernels` and what the kernel does."""
KERNELS = tuple(ABOUT)
"""The words in the order in which they are written."""
ALIASES = {"swiglu": "glu", "geglu": "glu"}
SILU = ("silu", "swish")
"""Activations that `LigerSwiGLUMLP` and `LigerExperts` accept."""


class LigerFamily(Struct, frozen=True, kw_only=True):
    """What Liger has for one model family."""

    kernels: tuple[str, ...] = ("rms_norm", "rope", "glu", "cross_entropy", "fused_linear_cross_entropy")
    """Those that change something when they are switched on."""
    off_by_default: tuple[str, ...] = ("cross_entropy",)
    glu_keyword: str = "swiglu"
    """The apply function's name for `glu`."""
    without_effect: dict[str, str] = {}
    """Kernels that the apply function takes a switch for, and why it is no use."""

    @property
    def default(self) -> tuple[str, ...]:
        """What the apply function switches on when nothing is said."""
        return tuple(kernel for kernel in self.kernels if kernel not in self.off_by_default)

    def keyword(self, kernel: str) -> str:
        """The apply function's argument for a kernel."""
        return self.glu_keyword if kernel == "glu" else kernel


_NO_ROPE = ("rms_norm", "glu", "cross_entropy", "fused_linear_cross_entropy")
_NO_CROSS_ENTROPY = ("rms_norm", "rope", "glu", "fused_linear_cross_entropy")
_UNUSED_LOSS = "it replaces a name that the family's code in transformers 5 no longer reads"
_INTERLEAVED = "the family's rotary positions are interleaved, and Liger skips the switch with a warning"
_USUAL = LigerFamily()
_GEGLU = LigerFamily(glu_keyword="geglu")
_UNUSED_CROSS_ENTROPY = LigerFamily(kernels=_NO_CROSS_ENTROPY, without_effect={"cross_entropy": _UNUSED_LOSS})
_LATENT = LigerFamily(kernels=_NO_ROPE, without_effect={"rope": _INTERLEAVED})
LIGER: dict[str, LigerFamily] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "exaone4": _USUAL,
    "gemma": _GEGLU,
    "gemma2": _GEGLU,
    "gemma3_text": _GEGLU,
    "glm4": LigerFamily(
        kernels=_NO_ROPE, without_effect={"rope": "Liger has none for GLM-4 and raises NotImplementedError"}
    ),
    "gpt_oss": LigerFamily(
        kernels=("rms_norm", "rope", "cross_entropy", "fused_linear_cross_entropy"),
        without_effect={"glu": "the family's experts have code of their own, and Liger ignores the switch"},
    ),
    "granite": LigerFamily(
        kernels=("rms_norm", "rope", "glu", "cross_entropy"),
        off_by_default=(),
        without_effect={
            "fused_linear_cross_entropy": "Granite scales its logits: Liger raises NotImplementedError"
        },
    ),
    "llama": _USUAL,
    "llama4_text": LigerFamily(
        kernels=_NO_CROSS_ENTROPY,
        without_effect={
            "cross_entropy": _UNUSED_LOSS,
            "layer_norm": "only the vision part of Llama-4 has LayerNorms",
        },
    ),
    "ministral": _UNUSED_CROSS_ENTROPY,
    "mistral": _UNUSED_CROSS_ENTROPY,
    "mixtral": _USUAL,
    "nemotron": LigerFamily(
        kernels=("relu_squared", "fused_linear_cross_entropy"),
        without_effect={"cross_entropy": _UNUSED_LOSS},
    ),
    "olmo2": _USUAL,
    "olmo3": _USUAL,
    "phi3": _USUAL,
    "qwen2": _USUAL,
    "qwen3": _USUAL,
    "qwen3_moe": _USUAL,
    "smollm3": _USUAL,
}
"""Those of `MODEL_TYPE_TO_APPLY_LIGER_FN` that have a row in the family tables."""
FUSED_EXPERTS = frozenset({"deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe"})
"""Families whose experts `glu` replaces as a whole (`LigerExperts`)."""


def in_order(names: Iterable[str]) -> list[str]:
    """Names of kernels in the usual order; those that are no word of the option come last."""
    given = set(names)
    return [*(kernel for kernel in KERNELS if kernel in given), *sorted(given.difference(KERNELS))]


@lru_cache(maxsize=256)
def parse_kernels(text: str) -> tuple[str, ...] | None:
    """The kernels that a value of `liger_kernels` names, in the usual order; None stands for `all`."""
    if text == ALL:
        return None
    words = {ALIASES.get(word, word) for word in map(str.strip, text.split(","))}
    return tuple(kernel for kernel in KERNELS if kernel in words)


def check_kernels(text: str, where: str) -> str:
    """The value as it is kept: `all`, or known words in the usual order; raises UsageError otherwise."""
    plain = ",".join(word.strip().lower().replace("-", "_") for word in text.split(","))
    if plain == ALL:
        return ALL
    known = (*KERNELS, *ALIASES)
    for word in plain.split(","):
        if word not in known:
            words = f"{ALL}, or some of {', '.join(KERNELS)} joined by commas"
            raise bad_value(where, "liger_kernels", word or text, words, (ALL, *known))
    return ",".join(parse_kernels(plain) or ())


@lru_cache(maxsize=1024)
def _on(family: str, text: str) -> frozenset[str]:
    has = LIGER.get(family)
    if has is None:
        return frozenset()
    asked = parse_kernels(text)
    return frozenset(has.default if asked is None else set(asked) & set(has.kernels))


_NONE: frozenset[str] = frozenset()


def kernels_on(spec: RunSpec) -> frozenset[str]:
    """Liger's kernels that a run uses."""
    options = spec.options
    return _on(spec.model.family, options.liger_kernels) if options.liger else _NONE


def missing_kernels(spec: RunSpec) -> tuple[str, ...]:
    """Kernels that a run asks for by name and that its family does not have."""
    has, asked = LIGER.get(spec.model.family), parse_kernels(spec.options.liger_kernels)
    if not spec.options.liger or has is None or asked is None:
        return ()
    return tuple(kernel for kernel in asked if kernel not in has.kernels)


def family_kernels(spec: RunSpec) -> str:
    """The words that may be given for the run's family, as they would be typed."""
    has = LIGER.get(spec.model.family)
    return ",".join(has.kernels) if has is not None else ""


def why_missing(spec: RunSpec) -> str:
    """Why the first missing kernel is."""
    has, missing = LIGER.get(spec.model.family), missing_kernels(spec)
    reason = has.without_effect.get(missing[0]) if has is not None and missing else None
    return reason or "Liger has no such kernel for this family and would change nothing"


def apply_arguments(family: str, text: str) -> dict[str, bool]:
    """Keyword arguments for the family's apply function: none for `all`, else every switch it has."""
    has = LIGER.get(family)
    if has is None or parse_kernels(text) is None:
        return {}
    on = _on(family, text)
    takes = (*has.kernels, *has.without_effect)
    return {has.keyword(kernel): kernel in on for kernel in KERNELS if kernel in takes}


def liger_text(spec: RunSpec) -> str:
    """`liger`, or with its kernels where not all that are usual run; empty where it is off."""
    options = spec.options
    if not options.liger:
        return ""
    if options.liger_kernels == ALL:
        return "liger"
    return "liger: " + (", ".join(in_order(kernels_on(spec))) or "no kernel")
