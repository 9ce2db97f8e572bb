"""A head of its own in the files of a model that ties it is told, since a plan counts the two once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.presets import resolve
from llmtop.presets.cautions import cautions
from llmtop.presets.resolve import Layer, Machine
from llmtop.presets.spec import Script, ValueSource
from tests.presets.family_cases import CASES

BOX = Machine(gpu="cpu", gpus=1, host_memory_bytes=2**34)


def notes(folder: Path) -> list[str]:
    layer = Layer(ValueSource.COMMAND_LINE, "test", {"model": str(folder), "precision": "fp32"})
    spec = resolve.assemble([layer], name="test", machine=BOX)
    return [note for note in cautions(spec) if "the weights hold" in note]


def write_folder(folder: Path, tied: bool, *names: str) -> None:
    (folder / "config.json").write_text(json.dumps(CASES["llama"] | {"tie_word_embeddings": tied}))
    entry = {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(24)
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [("lm_head.weight",), ()])
def test_a_head_beside_its_tied_embedding_is_told(tied: bool, head: tuple[str, ...], tmp_path: Path) -> None:
    write_folder(tmp_path, tied, "model.embed_tokens.weight", *head)
    told = notes(tmp_path)
    assert bool(told) == (tied and bool(head))
    assert all("lm_head.weight" in note and "12 parameters more" in note for note in told)


@pytest.mark.parametrize("key", ["save_at_end", "checkpoint_every", ""])
def test_a_launch_says_when_nothing_will_be_saved(key: str) -> None:
    given: dict[str, Any] = {"model": "smollm2-135m", "precision": "fp32"}
    given |= {key: key == "save_at_end" or 10} if key else {}
    spec = resolve.assemble([Layer(ValueSource.COMMAND_LINE, "test", given)], name="test", machine=BOX)
    told = [note for note in cautions(spec, launching=True) if note.startswith("nothing is saved: ")]
    assert bool(told) == (not key)
    assert all("checkpoint_every is 0 and save_at_end false; --save-at-end" in note for note in told)
    assert not any("nothing is saved" in note for note in cautions(spec))
    own = replace(spec, script=Script(command=("python", "train.py"), folder="/"))
    assert not any("nothing is saved" in note for note in cautions(own, launching=True))


@pytest.mark.parametrize(
    ("warmup", "steps", "end"),
    [
        (100, 50, "never reaches its value; --warmup-steps 5 is a tenth of the run"),
        (50, 50, "reaches its value only at the end; --warmup-steps 5 is a tenth of the run"),
        (30, 4, "never reaches its value; --warmup-steps 0 leaves it out"),
        (49, 50, None),
        (0, 1, None),
    ],
)
def test_a_warm_up_that_takes_the_whole_run_is_told(warmup: int, steps: int, end: str | None) -> None:
    given = {"model": "smollm2-135m", "precision": "fp32", "warmup_steps": warmup, "steps": steps}
    spec = resolve.assemble([Layer(ValueSource.COMMAND_LINE, "test", given)], name="test", machine=BOX)
    for launching in (False, True):
        told = [note for note in cautions(spec, launching=launching) if "warm-up" in note]
        begins = f"the warm-up takes {warmup} steps and the run has {steps}: the learning rate "
        assert told == ([] if end is None else [begins + end])


def test_a_broken_file_says_nothing_of_it(tmp_path: Path) -> None:
    write_folder(tmp_path, True, "model.embed_tokens.weight", "lm_head.weight")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert notes(tmp_path) == []
