"""What `llmtop quantize` takes: host memory at its peak, time, and bytes, beside those of a reference.

    python -m benchmarks.quantize                                  # a Llama of 0.3B, random, made on the spot
    python -m benchmarks.quantize --model-folder Llama-3.1-8B      # a real one
    python -m benchmarks.quantize --forms gguf:Q8_0,nf4 --perplexity --text wiki.test.raw

The reference loads the same folder whole, as a conversion that is not streamed has to (transformers, in the
folder's own precision), and says what its process held then. Both are measured in the same run on the same
machine, each in a process of its own, one after the other. Rows go to benchmarks/results/quantize.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "quantize.jsonl"
FORMS = "gguf:Q8_0,gguf:Q4_0,int8,nf4"
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_REFERENCE = """
import sys, torch
from transformers import AutoModelForCausalLM
from llmtop.trainer.worker.packing.peak import Peak
with Peak() as peak:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", local_files_only=True)
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())
print(peak.bytes)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-folder", type=Path, help="by default a small one, random")
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--perplexity", action="store_true", help="measure that too")
    parser.add_argument("--text", default="", help="to measure it on")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each measurement of it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are appended")
    args = parser.parse_args()
    with _folder(args.model_folder) as folder:
        reference = _reference(folder)
        print(f"reference, all weights in memory: {_shown(reference)}")
        for form in args.forms.split(","):
            row = _measured(folder, form, args)
            row["reference_peak_bytes"] = reference
            with args.out.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            _tell(row)
    return 0


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="llmtop-quantize-") as place:
        folder = Path(place) / "llama-0.3b"
        made = subprocess.run([sys.executable, "-c", _MAKE, str(folder), json.dumps(_LLAMA)], check=False)
        if made.returncode:
            raise SystemExit("the model could not be made")
        yield folder


_MAKE = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2]))).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


def _reference(folder: Path) -> int | None:
    done = subprocess.run(
        [sys.executable, "-c", _REFERENCE, str(folder)], capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None


def _measured(folder: Path, form: str, args: argparse.Namespace) -> dict[str, Any]:
    """One form: what the command says of it, and how long all of it took."""
    words = ["--text", args.text] if args.text else []
    words += ["--seconds", str(args.seconds)] if args.perplexity else ["--no-perplexity"]
    with tempfile.TemporaryDirectory(prefix="llmtop-quantize-") as place:
        out = Path(place) / "out"
        begun = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "llmtop.tui.cli",
                "quantize",
                str(folder.resolve()),
                "--to",
                form,
                "--json",
            ]
            + ["--out", str(out), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(f"{form}: {done.stderr}")
    found = json.loads(done.stdout)
    errors = [error["relative_rms"] for error in found.pop("errors") if error["relative_rms"]]
    return {
        **found,
        "source": folder.name,
        "output": form,
        "worst_relative_rms": max(errors, default=None),
        "command_seconds": round(seconds, 2),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def _tell(row: dict[str, Any]) -> None:
    peak, reference = row["peak_host_bytes"], row["reference_peak_bytes"]
    ratio = f"{peak / reference:.3f} of the reference" if peak and reference else "n/a"
    print(
        f"{row['form']:<10} {_shown(row['tensor_bytes'])} ({_shown(row['predicted_bytes'])} predicted),"
        f" {row['seconds']:.1f} s, peak {_shown(peak)}: {ratio}; worst error {row['worst_relative_rms']:.4f}"
    )


def _shown(size: int | None) -> str:
    return "n/a" if size is None else f"{size / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
