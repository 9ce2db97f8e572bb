"""What a model is to be packed to: the words of `--to`, and why some of them cannot be."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from llmtop.presets.errors import UsageError, nearest
from llmtop.profiler.memory.loading import WRITTEN_KINDS

PREFIX = "gguf:"
BITSANDBYTES = ("int8", "nf4")
FORMS = (*BITSANDBYTES, *(PREFIX + kind for kind in WRITTEN_KINDS))
_INSTEAD = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q4_1",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ1": "Q4_0",
    "IQ2": "Q4_0",
    "IQ3": "Q4_0",
    "IQ4": "Q4_0",
    "TQ1": "Q4_0",
    "TQ2": "Q4_0",
    "MXFP4": "Q4_0",
    "NVFP4": "Q4_0",
    "Q8_1": "Q8_0",
    "Q8_K": "Q8_0",
}
"""Types of GGUF that are not written, and the nearest that is."""
_FOR_OTHERS = ("TQ", "MXFP4", "NVFP4")


class Target(Struct, frozen=True, kw_only=True):
    form: str
    """As `--to` has it: one of `FORMS`."""

    @property
    def packer(self) -> Literal["bitsandbytes", "gguf"]:
        return "bitsandbytes" if self.form in BITSANDBYTES else "gguf"

    @property
    def kind(self) -> str:
        """GGUF's name of the type, or bitsandbytes' of the packing."""
        return self.form.removeprefix(PREFIX)


def read_target(text: str) -> Target:
    """Raises UsageError, with the nearest that works, for a word that means nothing or cannot be done."""
    word = text.strip()
    gguf, _, kind = word.rpartition(":")
    folded = f"{PREFIX}{kind.upper()}" if gguf.lower() == "gguf" else word.lower()
    if folded in FORMS:
        return Target(form=folded)
    bare = word.upper()
    if not gguf and bare in WRITTEN_KINDS:
        raise UsageError(f"--to {text}: a type of GGUF", fix=f"--to {PREFIX}{bare}")
    wanted = kind.upper()
    instead = next((other for start, other in _INSTEAD.items() if wanted.startswith(start)), None)
    if instead is not None:
        raise UsageError(
            f"--to {text}: gguf:{wanted} cannot be written", why=_why(wanted), fix=f"--to {PREFIX}{instead}"
        )
    guess = nearest(folded, FORMS)
    raise UsageError(
        f"--to {text}: not a known form",
        why=f"known are {', '.join(FORMS)}",
        fix=f"did you mean {guess}?" if guess else "llmtop quantize --help tells what each is for",
    )


def _why(kind: str) -> str:
    if kind.startswith(_FOR_OTHERS):
        return "it is for models that were trained in those few values; other weights lose too much in it"
    return (
        "only llama.cpp's own program packs to it (from a file in F16 or BF16:"
        f" llama-quantize IN.gguf OUT.gguf {kind})"
    )
