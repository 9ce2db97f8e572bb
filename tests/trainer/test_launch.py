"""What is refused before a run starts, and that one that starts needs nobody."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.hardware.disk import FileSystem
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control, preflight
from llmtop.trainer.launch import devices_for, start_run, start_supervisor
from tests.hosts.lab import wait_for
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer.supervised import TIMEOUT_SECONDS, worker_command


def check(kind: Any = "cpu", **options: Any) -> None:
    # Of sequences so short any text is enough.
    preflight.preflight(recorded_spec(kind, **{"seq_len": 2, **options}))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules and distributions that preflight believes in; change the set to change its mind."""
    names = {"torch", "deepspeed", "transformers", "tokenizers", "safetensors"}

    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in names else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(preflight, "_has_distribution", names.__contains__)
    monkeypatch.setattr(preflight, "libaio", lambda: "libaio.so.1")
    return names


def test_a_plain_run_passes(installed: set[str]) -> None:
    check()


def test_a_package_that_two_options_need_is_named_once(installed: set[str]) -> None:
    with pytest.raises(UsageError, match="^bitsandbytes and peft are not installed"):
        check(quantization="nf4", lora_rank=16, optimizer="adamw_8bit")
    installed.add("peft")
    with pytest.raises(UsageError, match="^bitsandbytes is not installed"):
        check(quantization="nf4", lora_rank=16, optimizer="adamw_8bit")


def test_missing_stack_names_the_extra(installed: set[str]) -> None:
    installed -= {"torch", "deepspeed", "tokenizers"}
    with pytest.raises(UsageError, match="torch, deepspeed and tokenizers are not installed") as caught:
        check()
    assert ".[train]" in caught.value.fix
    installed |= {"torch", "tokenizers"}
    with pytest.raises(UsageError, match="^deepspeed is not installed"):
        check()


@pytest.mark.parametrize(
    ("options", "module", "fix"),
    [
        ({"optimizer": "adamw_8bit"}, "bitsandbytes", "[kernels]"),
        ({"optimizer": "paged_adamw_32bit"}, "bitsandbytes", "[kernels]"),
        ({"quantization": "nf4", "lora_rank": 8}, "bitsandbytes", "[kernels]"),
        ({"lora_rank": 8}, "peft", "[kernels]"),
        ({"liger": True}, "liger_kernel", "[kernels]"),
        ({"deepspeed": {"tensorboard": {"enabled": True}}}, "tensorboard", "deepspeed.tensorboard out"),
        ({"attention": "flash_attention_2"}, "flash-attn", "--no-build-isolation flash-attn"),
        ({"attention": "flash_attention_3"}, "flash-attn-3", "sdpa"),
        ({"attention": "flash_attention_4"}, "flash-attn-4", "flash-attn-4"),
    ],
)
def test_options_need_their_extras(
    options: dict[str, Any], module: str, fix: str, installed: set[str]
) -> None:
    with pytest.raises(UsageError, match=module) as caught:
        check(**options)
    assert fix in caught.value.fix
    installed |= {"bitsandbytes", "peft", "liger_kernel", "flash_attn", "flash_attn_interface", module}
    check(**options)


@pytest.mark.parametrize(
    ("version", "other"), [("2", "flash-attn-4"), ("3", "flash-attn"), ("4", "flash-attn")]
)
def test_one_flash_attention_does_not_stand_for_another(
    version: str, other: str, installed: set[str]
) -> None:
    installed |= {"flash_attn", "flash_attn_interface", other}
    with pytest.raises(UsageError, match="^flash-attn.* is not installed"):
        check(attention=f"flash_attention_{version}")


def test_data_must_be_there(installed: set[str], tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match="does not exist") as caught:
        check(data=str(tmp_path / "corpus.json"))
    assert "corpus.jsonl" in caught.value.fix
    check(data=str(tmp_path / "corpus.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no file"):
        check(data=str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="there is no data builtin:french"):
        check(data="builtin:french")
    with pytest.raises(UsageError, match="tokenizer"):
        check(tokenizer=str(tmp_path / "none"))


def test_a_folder_of_hidden_files_holds_none(installed: set[str], tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("text")
    (tmp_path / ".hidden.txt").write_text("text")
    with pytest.raises(UsageError, match="holds no files"):
        check(data=str(tmp_path))
    (tmp_path / "seen.txt").write_text("text")
    check(data=str(tmp_path))


def test_data_must_be_a_file_that_stays(installed: set[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for data in (str(tmp_path / "pipe"), os.devnull):
        with pytest.raises(UsageError, match="not a regular file"):
            check(data=data)


def test_a_tokenizer_folder_must_hold_one(installed: set[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no tokenizer") as caught:
        check(tokenizer=str(tmp_path))
    assert "tokenizer.json" in caught.value.why
    (tmp_path / "tokenizer.json").write_text("{}")
    check(tokenizer=str(tmp_path))


def test_data_that_is_empty_too_little_or_no_text_is_refused(installed: set[str], tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.touch()
    for data in (file, tmp_path):
        with pytest.raises(UsageError, match="is empty"):
            check(data=str(data))
    file.write_text("a")
    with pytest.raises(UsageError, match="too little text: 1 byte") as caught:
        check(data=str(file), seq_len=128)
    assert "--seq-len" in caught.value.fix
    file.write_bytes(b"text\0text" * 100)
    with pytest.raises(UsageError, match="not UTF-8 text") as caught:
        check(data=str(file))
    assert "byte 4 is NUL" in caught.value.why
    file.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(UsageError, match="not UTF-8 text"):
        check(data=str(file))
    # A character lies across the end of what is read.
    file.write_text("\u00e9" * 40_000, encoding="utf-8-sig")
    check(data=str(file))


@pytest.mark.parametrize("turn", [{"role": "user", "content": "hi"}, {"from": "human", "value": "hi"}])
@pytest.mark.parametrize("field", ["text", "messages"])
def test_records_of_chats_are_told_as_chats_with_both_ways_out(
    turn: dict[str, str], field: str, installed: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "sft.jsonl"
    file.write_text(json.dumps({"id": "a1", "messages": [turn]}))
    with pytest.raises(UsageError) as caught:
        check(data=str(file), text_field=field)
    told = str(caught.value)
    assert "'messages' holds the messages of a chat" in told and "takes plain text" in told
    assert "chat template" in caught.value.fix and "llmtop run -- python" in caught.value.fix
    # A field of text beside them is the nearer way.
    file.write_text(json.dumps({"messages": [turn], "text": "hi"}))
    check(data=str(file), text_field="text")


def test_a_field_that_holds_no_text_names_the_one_that_does(installed: set[str], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"id": 5, "body": "a"}))
    with pytest.raises(UsageError, match="'id' is int, not text") as caught:
        check(data=str(file), text_field="id")
    assert caught.value.fix.endswith("--text-field body")


@pytest.mark.parametrize("where", ["file", "folder"])
def test_the_first_record_is_looked_at(where: str, installed: set[str], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"txt": "a"}\n')
    data = str(file if where == "file" else tmp_path)
    with pytest.raises(UsageError, match="line 2: no field 'text'") as caught:
        check(data=data)
    assert "--text-field txt" in caught.value.fix
    check(data=data, text_field="txt")
    file.write_text("not JSON\n")
    with pytest.raises(UsageError, match="line 1: not JSON"):
        check(data=data)
    file.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="line 1: not readable JSON"):
        check(data=data)
    file.write_text('\ufeff{"text": "a"}\n', encoding="utf-8")
    check(data=data)


@pytest.mark.parametrize("option", ["data", "tokenizer"])
def test_the_home_of_nobody_is_a_missing_file(option: str, installed: set[str]) -> None:
    with pytest.raises(UsageError, match=f"{option} ~no-such-user/x does not exist"):
        check(**{option: "~no-such-user/x"})


def test_saved_datasets_need_their_library(installed: set[str], tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match="datasets is not installed") as caught:
        check(data=str(tmp_path))
    assert "[data]" in caught.value.fix


def test_nvme_folder_must_be_writable(installed: set[str], tmp_path: Path) -> None:
    check(zero=3, offload_param="nvme", nvme_path=str(tmp_path / "new" / "folder"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="nvme_path"):
        check(zero=3, offload_param="nvme", nvme_path=str(tmp_path / "file" / "folder"))
    with pytest.raises(UsageError, match="nvme_path"):
        check(zero=3, offload_param="nvme", nvme_path=str(tmp_path / "file"))
    with pytest.raises(UsageError, match="nvme_path"):
        check(zero=3, offload_optimizer="nvme", nvme_path="/proc/self")
    assert not (tmp_path / "new").exists()


def test_nvme_offload_needs_libaio(
    installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "libaio", lambda: None)
    with pytest.raises(UsageError, match="libaio") as caught:
        check(zero=3, offload_optimizer="nvme", nvme_path=str(tmp_path))
    assert "libaio-dev" in caught.value.fix
    check(zero=3, offload_optimizer="cpu")


def test_nodes_need_hosts(tmp_path: Path) -> None:
    spec = recorded_spec("cpu", nodes=2)
    with pytest.raises(UsageError, match="nodes = 2, and no hosts are named"):
        start_run(spec, recorded_prediction(spec), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_without_their_tokenizer_are_not_launched(installed: set[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = msgspec.structs.replace(recorded_spec("cpu", seq_len=2), weights_dir=str(tmp_path / "model"))
    with (
        pytest.raises(UsageError, match="has weights and no tokenizer"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(preflight, "check_weights", lambda spec: None)
        start_run(spec, recorded_prediction(spec), root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_gpus_must_be_there(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a run is to be on hosts, they are asked.
    check(nodes=2)

    class NoGpu:
        problem = "NVML: driver not loaded"
        is_silent = False

        def visible_indices(self) -> tuple[int, ...]:
            return ()

        def close(self) -> None:
            pass

    monkeypatch.setattr(preflight, "NvmlReader", NoGpu)
    with pytest.raises(UsageError, match="wants 2 GPUs, and this machine shows 0") as caught:
        check("cuda")
    assert "driver not loaded" in caught.value.why
    assert "constraints-cpu" in preflight._install("train")
    # A driver that hangs is there, and torch for it has a use.
    monkeypatch.setattr(NoGpu, "is_silent", True)
    assert "constraints-cpu" not in preflight._install("train")


@pytest.fixture
def spec() -> RunSpec:
    return recorded_spec("cpu", sample_seconds=0.2)


def test_nothing_is_left_of_a_run_that_is_refused(spec: RunSpec, tmp_path: Path) -> None:
    refused = recorded_spec("cpu", deepspeed={"gradient_cliping": 1})
    with pytest.raises(UsageError, match="gradient_cliping"):
        start_run(refused, recorded_prediction(refused), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("installed")
def test_a_run_outlives_whoever_launched_it(spec: RunSpec, tmp_path: Path) -> None:
    """A process that launches and is killed: the run goes on."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from llmtop.trainer import launch\n"
        "from tests.recorded_spec import recorded_prediction, recorded_spec\n"
        "launch.preflight = lambda spec, **_: None\n"
        "spec = recorded_spec('cpu', sample_seconds=0.2)\n"
        "run = launch.start_run(spec, recorded_prediction(spec), root=Path(sys.argv[1]))\n"
        "sys.stdout.write(f'{run.run_id} {os.getsid(0)}')\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "LLMTOP_WORKER_COMMAND": worker_command("trains")},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == -9, done.stderr
    run_id, session = done.stdout.split()
    run = RunDir.open(tmp_path / run_id)
    assert run.supervisor_alive()
    identity = run.supervisor_identity()
    assert identity is not None
    assert os.getsid(identity.pid) == identity.pid != int(session)
    control.stop(run, save=False)
    end = control.wait_for_end(run, TIMEOUT_SECONDS)
    assert end is not None
    assert end.state == "stopped"


def test_start_run_writes_what_the_ranks_use(
    spec: RunSpec, installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", worker_command("finishes"))
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path))
    run = start_run(spec, recorded_prediction(spec))
    assert run.path.parent == tmp_path
    assert run.deepspeed_config()["train_batch_size"] == spec.global_batch
    end = control.wait_for_end(run, TIMEOUT_SECONDS)
    assert end is not None
    assert end.state == "completed"


@pytest.mark.usefixtures("installed")
def test_a_run_can_be_given_some_of_the_devices(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", worker_command("trains"))
    supervise = partial(start_supervisor, visible_devices="GPU-a,GPU-b")
    run = start_run(spec, recorded_prediction(spec), root=tmp_path, supervise=supervise)
    identity = run.supervisor_identity()
    assert identity is not None
    environ = Path(f"/proc/{identity.pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=GPU-a,GPU-b" in environ
    wait_for(lambda: _sampled_with_logs(run, spec.world_size))
    control.stop(run, save=False)
    assert control.wait_for_end(run, TIMEOUT_SECONDS) is not None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_for(run) == "GPU-a,GPU-b"  # when it goes on, from a shell that says nothing of devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert devices_for(run) == "3"


def _sampled_with_logs(run: RunDir, ranks: int) -> bool:
    """Whether the newest sample of a run tells how long each log was."""
    hardware = read_state(run).hardware
    if hardware is None or hardware.host.log_bytes is None:
        return False
    return sum(process.log_bytes is not None for process in hardware.processes) == ranks


@pytest.mark.parametrize(
    ("kind", "words"),
    [("tmpfs", "lies in memory"), ("nfs4", "network file system"), ("fuse.sshfs", "network")],
)
def test_nvme_offload_needs_a_local_drive(
    kind: str, words: str, installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "file_system", lambda _path: FileSystem(kind=kind, mount="/there"))
    with pytest.raises(UsageError, match=words) as caught:
        check(zero=3, offload_optimizer="nvme", nvme_path=str(tmp_path))
    assert f"{kind} on /there" in caught.value.what


def test_nvme_offload_needs_room(
    installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free_bytes", lambda _path: 10 << 30)
    monkeypatch.setattr(preflight, "_build", lambda _spec: None)
    spec = recorded_spec(zero=3, offload_optimizer="nvme", nvme_path=str(tmp_path))
    preflight.preflight(spec, nvme_bytes=10 << 30)
    with pytest.raises(UsageError, match="has 10.0 GiB free") as caught:
        preflight.preflight(spec, nvme_bytes=11 << 30)
    assert "11.0 GiB" in caught.value.why


def test_a_drive_given_by_raw_key_is_looked_at_too(
    installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(preflight, "_drive", lambda path, needed: seen.append((path.name, needed)))
    monkeypatch.setattr(preflight, "_build", lambda _spec: None)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    options: dict[str, Any] = {"zero": 3, "offload_optimizer": "nvme", "nvme_path": str(tmp_path / "one")}
    second = {"zero_optimization": {"offload_param": {"nvme_path": str(tmp_path / "two")}}}
    preflight.preflight(recorded_spec(**options), nvme_bytes=5)
    preflight.preflight(recorded_spec(**options, offload_param="nvme", deepspeed=second), nvme_bytes=5)
    assert seen == [("one", 5), ("one", 0), ("two", 0)]
