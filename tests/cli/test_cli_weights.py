"""`llmtop weights` as it is typed: what it makes, and what it refuses without leaving anything behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.spec import Script
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import room, weightsout
from llmtop.trainer.partial import partial_folder
from llmtop.trainer.statefile import INDEX, MARKER, StateIndex, StoredParameter, read_index
from llmtop.tui.commands import weights as command
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run
from tests.worker.handmade_state import STEP, llama_shapes, saved_run, write_marker, write_state


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    return saved_run(runs_root / "saved")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"


def nothing_left(out: Path) -> bool:
    return list(out.parent.iterdir()) == []


def test_a_checkpoint_becomes_a_folder(llmtop: Llmtop, run: RunDir, out: Path) -> None:
    weights = write_state(run.checkpoints_dir / "step-7.old", llama_shapes())
    # What one that was killed has left is no obstacle.
    partial_folder(out).mkdir()
    (partial_folder(out) / "model.safetensors").write_bytes(b"half")
    answer = llmtop("weights", "saved", str(out), "--dtype", "fp32")
    assert answer.code == ExitCode.DONE, answer.err
    assert answer.out.startswith(f"{out}: all weights of step {STEP} in fp32, 21 tensors, 123,200 numbers")
    assert "no tokenizer is with it" in answer.out
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys() and all(found[key].equal(weights[key]) for key in found)
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"]
    again = llmtop("weights", "saved", str(out))
    assert again.code == ExitCode.USAGE and "is there already" in again.err
    empty = out.with_name("empty")
    empty.mkdir()
    told = llmtop("weights", "saved", str(empty), "--from", str(STEP), "--json").json()
    assert told["dtype"] == "fp32" and told["step"] == STEP and told["path"] == str(empty)
    assert told["size_bytes"] == sum(path.stat().st_size for path in empty.iterdir())
    assert json.loads((empty / "config.json").read_text())["dtype"] == "float32"


def test_steps_after_the_newest_checkpoint_are_told_of(llmtop: Llmtop, runs_root: Path, out: Path) -> None:
    made = make_recorded_run(runs_root, steps=STEP + 3, checkpoint_every=0)
    saved = saved_run(runs_root / "saved")
    shutil.copytree(saved.checkpoints_dir, made.checkpoints_dir, dirs_exist_ok=True)
    made.spec_path.write_bytes(saved.spec_path.read_bytes())
    answer = llmtop("weights", made.run_id, str(out))
    words = f"the run's last step is {STEP + 3} and was not saved: these are the weights of step {STEP}"
    assert answer.code == ExitCode.DONE and f"WARNING: {words}" in answer.out, answer.err
    told = llmtop("weights", made.run_id, str(out.with_name("again")), "--json").json()
    assert (told["step"], told["last_step"], told["warning"]) == (STEP, STEP + 3, words)


def no_checkpoint(run: RunDir) -> None:
    for path in run.checkpoints_dir.glob("step-*/*"):
        path.unlink()


def file_cut_off(run: RunDir) -> None:
    path = run.checkpoints_dir / f"step-{STEP}" / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def as_a_script(run: RunDir) -> None:
    spec = replace(run.spec(), script=Script(command=("python", "sft.py"), folder="/"))
    run.spec_path.write_bytes(msgspec.json.encode(spec))


def imported(run: RunDir) -> None:
    run.imported_path.write_text("{}")


def of_adapters(run: RunDir) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    first, *others = parameters_of(run)
    change_index(run, parameters=(replace(first, name=name), *others))


def over_a_lost_base(run: RunDir) -> None:
    of_adapters(run)
    change_index(run, left_out="the base")
    spec = replace(run.spec(), weights_dir="/nowhere/llama")
    run.spec_path.write_bytes(msgspec.json.encode(spec))


def over_random_packed_numbers(run: RunDir) -> None:
    of_adapters(run)
    change_index(run, left_out="the base")


def of_a_newer_format(run: RunDir) -> None:
    change_index(run, format=99)


def parameters_of(run: RunDir) -> tuple[StoredParameter, ...]:
    return read_index(run.checkpoints_dir / f"step-{STEP}").parameters


def change_index(run: RunDir, **changes: object) -> None:
    folder = run.checkpoints_dir / f"step-{STEP}"
    index: StateIndex = replace(read_index(folder), **changes)
    (folder / INDEX).write_bytes(msgspec.json.encode(index))
    (folder / MARKER).unlink()
    write_marker(folder)


@pytest.mark.parametrize(
    ("spoil", "words", "told"),
    [
        (no_checkpoint, (), "has no checkpoint to take weights from"),
        (file_cut_off, (), "has no checkpoint to take weights from"),
        (None, ("--from", "9"), f"there is no complete checkpoint 9\n  why: complete are step {STEP}"),
        (None, ("--from", "/nowhere/step-9"), "there is no complete checkpoint /nowhere/step-9"),
        (as_a_script, (), "model.save_pretrained(FOLDER)"),
        (imported, (), "it came from an archive"),
        (None, ("--merge",), "trained no adapters"),
        (None, ("--adapters",), "trained no adapters"),
        (None, ("--base", "original"), "add --merge"),
        (None, ("--quantized",), "was not trained to be rounded"),
        (of_adapters, (), "--merge adds them to the base"),
        (of_adapters, ("--merge", "--base", "original"), "packed to 8 or 4 bits"),
        (over_a_lost_base, ("--merge",), "the adapters belong to the weights in /nowhere/llama"),
        (over_random_packed_numbers, ("--merge",), "kept nowhere"),
        (of_a_newer_format, (), "is a training state of format 99"),
    ],
)
def test_what_cannot_be_is_told_and_leaves_nothing(
    llmtop: Llmtop,
    run: RunDir,
    out: Path,
    spoil: Callable[[RunDir], None] | None,
    words: tuple[str, ...],
    told: str,
) -> None:
    if spoil is not None:
        spoil(run)
    answer = llmtop("weights", "saved", str(out), *words)
    assert answer.code == ExitCode.USAGE and told in answer.err, answer.err
    assert answer.out == "" and "Traceback" not in answer.err
    assert nothing_left(out)


def test_there_must_be_room_before_anything_is_written(
    llmtop: Llmtop, run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda folder: 100_000)
    answer = llmtop("weights", "saved", str(out))
    assert "there is no room for the weights" in answer.err and "it takes 481 KiB" in answer.err
    monkeypatch.undo()
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(run.path.parent))
    monkeypatch.setattr(weightsout, "memory_left_bytes", lambda: 1 << 29)
    answer = llmtop("weights", "saved", str(out))
    assert "too little host memory" in answer.err and "512 MiB is available" in answer.err
    assert nothing_left(out)


def test_two_do_not_write_one_folder(llmtop: Llmtop, run: RunDir, out: Path) -> None:
    partial_folder(out).mkdir()
    (partial_folder(out) / "being-written").touch()
    with hold(partial_folder(out), lambda: UsageError("taken")):
        answer = llmtop("weights", "saved", str(out))
    assert answer.code == ExitCode.USAGE and "is being written already" in answer.err
    assert [path.name for path in partial_folder(out).iterdir()] == ["being-written"]


def test_a_place_that_cannot_be_written_is_told(llmtop: Llmtop, run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = llmtop("weights", "saved", str(tmp_path / "file" / "model"))
    assert answer.code == ExitCode.USAGE and "cannot write" in answer.err
    answer = llmtop("weights", "saved", "/proc/model")
    assert answer.code == ExitCode.USAGE and "name a folder that can be written" in answer.err
    # A slip of the hand makes no folder.
    answer = llmtop("weights", "saved", str(tmp_path / "none" / "model"))
    assert answer.code == ExitCode.USAGE and f"mkdir -p {tmp_path / 'none'}" in answer.err
    assert not (tmp_path / "none").exists()


def test_the_head_of_packed_weights_names_the_type_of_the_rest(tmp_path: Path) -> None:
    made = weightsout.WeightsOut(
        path=tmp_path,
        run="saved",
        step=12,
        content="quantized",
        dtype="fp32",
        tensors=21,
        parameters=100,
        size_bytes=100,
        notes=(),
    )
    head = command._lines(made)[0]
    assert head.startswith(
        f"{tmp_path}: packed weights of step 12, all that is not packed in fp32, 21 tensors"
    )


def test_elements_that_no_file_has_are_told(llmtop: Llmtop, run: RunDir, out: Path) -> None:
    folder = run.checkpoints_dir / f"step-{STEP}"
    files = read_index(folder).files
    change_index(run, files=(files[0], replace(files[1], slabs=files[1].slabs[1:])))
    answer = llmtop("weights", "saved", str(out))
    assert answer.code == ExitCode.USAGE and "Traceback" not in answer.err
    assert "does not have all of model.embed_tokens.weight" in answer.err
    assert nothing_left(out)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in told.split()]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_one_that_is_ended_leaves_nothing_under_the_name(
    llmtop: Llmtop, run: RunDir, out: Path, how: signal.Signals
) -> None:
    """Ended as soon as the process that writes is there."""
    process = subprocess.Popen([sys.executable, "-m", "llmtop.tui.cli", "weights", "saved", str(out)])
    wait_until(lambda: bool(children(process.pid)))
    writer = children(process.pid)[0]
    process.send_signal(how)
    process.wait(60)
    wait_until(lambda: not Path(f"/proc/{writer}").exists())
    assert not out.exists()
    assert partial_folder(out).exists() == (how == signal.SIGKILL)


def test_a_writer_that_the_kernel_ends_is_told_so(
    llmtop: Llmtop, run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(weightsout, "_TASK", replace(weightsout._TASK, module="tests.cli.killed_writer"))
    answer = llmtop("weights", "saved", str(out))
    assert answer.code == ExitCode.OUT_OF_MEMORY and "host memory runs out" in answer.err
    assert nothing_left(out)
