"""What `llmtop quantize` takes: host memory at its peak, time, and bytes, beside those of a reference.

    python -m benchmarks.quantize                                  # a Llama of 0.3B, random, made on the spot
    python -m benchmarks.quantize --model-folder Llama-3.1-8B      # a real one
    python -m benchmarks.quantize --preset llama-3.1-8b --no-reference   # random, 16 GB on the drive
    python -m benchmarks.quantize --forms gguf:Q8_0,nf4 --perplexity --text wiki.test.raw

The reference holds the same folder whole in its own precision, as a conversion that is not streamed has to;
with `--converter llama.cpp/convert_hf_to_gguf.py` it is llama.cpp's own, to Q8_0, for tokenizers it knows.
All are measured in the same run, one after the other, each in a process of its own, by the memory that is no
file's (`RssAnon`). Rows go to benchmarks/results/quantize.jsonl.
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

from benchmarks.shaped import write_shaped
from llmtop.trainer.worker.packing.peak import anonymous_bytes

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
_WHOLE = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", local_files_only=True)
for parameter in model.parameters():
    parameter.data = parameter.data.clone()  # of its own, where it was the file's page
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-folder", type=Path, help="by default a small one, random")
    parser.add_argument("--preset", help="random weights in the shape of a model preset")
    parser.add_argument("--layers", type=int, help="of --preset: so many blocks instead of all")
    parser.add_argument("--no-reference", action="store_true", help="where all weights do not fit in memory")
    parser.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py, as the reference")
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--perplexity", action="store_true", help="measure that too")
    parser.add_argument("--text", default="", help="to measure it on")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each measurement of it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are appended")
    args = parser.parse_args()
    with _folder(args) as folder:
        reference, seconds = (None, 0.0) if args.no_reference else _reference(folder, args.converter)
        name = "all weights in memory" if args.converter is None else args.converter.name
        name = "" if args.no_reference else name
        if name:
            print(f"reference, {name}: {_shown(reference)} in {seconds:.1f} s")
        for form in args.forms.split(","):
            row = _measured(folder, form, args)
            row |= {
                "reference": name,
                "reference_peak_bytes": reference,
                "reference_seconds": round(seconds, 2),
            }
            with args.out.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            _tell(row)
    return 0


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    if args.model_folder is not None:
        yield args.model_folder
        return
    with tempfile.TemporaryDirectory(prefix="llmtop-quantize-") as place:
        if args.preset:
            folder = Path(place) / (args.preset + (f"-{args.layers}-layers" if args.layers else ""))
            write_shaped(folder, args.preset, args.layers)
            yield folder
            return
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


def _reference(folder: Path, converter: Path | None) -> tuple[int | None, float]:
    """(memory, seconds) of somebody else's way."""
    if converter is None:
        return _peak_of([sys.executable, "-c", _WHOLE, str(folder)])
    with tempfile.TemporaryDirectory(prefix="llmtop-quantize-") as place:
        words = [str(folder), "--outtype", "q8_0", "--outfile", str(Path(place) / "out.gguf")]
        return _peak_of([sys.executable, str(converter), *words])


def _peak_of(command: list[str]) -> tuple[int | None, float]:
    """The most that a process held of its own, looked at twenty times a second; and how long it took."""
    begun, peak = time.monotonic(), None
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        while process.poll() is None:
            now = anonymous_bytes(process.pid)
            peak = now if peak is None or (now or 0) > peak else peak
            time.sleep(0.05)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"the reference failed: {said.read().decode(errors='replace')[-2000:]}")
    return peak, time.monotonic() - begun


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
    found = row["perplexity"]
    if found is not None:
        most = _shown(found["peak_host_bytes"])
        print(
            f"{'':<10} perplexity {found['before']:.4g} before, {found['after']:.4g} after, of"
            f" {found['tokens']:,} tokens in {found['seconds']:.1f} s, peak {most}"
        )


def _shown(size: int | None) -> str:
    return "n/a" if size is None else f"{size / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
