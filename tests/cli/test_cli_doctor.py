"""`doctor`: what it says about machines that were made to be found wanting."""

from __future__ import annotations

import threading
import tomllib
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.profiler.hardware.aside import ask_once
from llmtop.tui.doctor import gpus, software, system
from llmtop.tui.doctor.check import Check, Machine
from tests.cli.conftest import Llmtop

BARE = Machine(torch_version=None, torch_cuda=None, gpu_names=(), driver_version=None, driver_cuda=None)
H200 = Machine(
    torch_version="2.11.0",
    torch_cuda="13.0",
    gpu_names=("NVIDIA H200", "NVIDIA H200"),
    driver_version="580.65",
    driver_cuda=(13, 0),
)


def look(machine: Machine) -> dict[str, Check]:
    checks = [*software.software_checks(machine), *(check(machine) for check in system.CHECKS)]
    return {check.name: check for check in checks}


def test_doctor_answers_for_everything_as_text_and_json(llmtop: Llmtop) -> None:
    answer = llmtop("doctor", "--json")
    assert answer.code == ExitCode.DONE
    checks = {check["name"]: check for check in answer.json()["checks"]}
    assert {"python", "torch", "deepspeed", "gpu", "nvcc", "ninja", "libaio", "ulimit -l"} <= set(checks)
    assert all(check["mend"] for check in checks.values() if check["status"] == "missing")
    text = llmtop("doctor").out
    assert all(name in text for name in checks)


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = look(H200)
    assert checks["gpu"].found == "2 x NVIDIA H200; driver 580.65, CUDA up to 13.0"
    assert checks["torch cuda"].status == "ok"


def test_without_a_driver_only_the_cpu_can_train() -> None:
    checks = look(BARE)
    assert checks["gpu"].status == "optional"
    assert checks["torch cuda"].status == "missing"


def test_a_driver_that_hangs_is_told(llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    for module in (software, gpus):
        monkeypatch.setattr(module, "ask_once", partial(ask_once, wait_seconds=0.05))
    monkeypatch.setattr(software, "_nvml", answers.wait)
    monkeypatch.setattr(gpus, "_looked", lambda *_: answers.wait())
    try:
        checks = {check["name"]: check for check in llmtop("doctor", "--json").json()["checks"]}
        assert checks["gpu"]["found"] == "the NVIDIA driver does not answer"
        assert "dmesg" in checks["gpu"]["mend"] and "gpu readings" not in checks
        (hangs,) = gpus.look_at_gpus().checks
        assert hangs.status == "warn" and "does not answer all" in hangs.found
    finally:
        answers.set()


def test_what_an_option_alone_needs_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "package_version", lambda _name: None)
    checks = look(BARE)
    optional = ("flash-attn", "liger-kernel", "bitsandbytes", "peft", "datasets", "gguf", "sentencepiece")
    for name in (*optional, "pyarrow", "prometheus-client", "tensorboardX", "wandb", "mlflow-skinny"):
        assert checks[name].status == "optional"
        assert "; for " in checks[name].found and checks[name].mend
    assert checks["torch"].status == checks["deepspeed"].status == "missing"


def test_every_package_of_an_extra_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name: "".join(lines) for name, lines in project["optional-dependencies"].items()}
    asked = {row.name: row for row in software.PACKAGES if row.extra}
    assert all(row.name in extras[row.extra] for row in asked.values())
    assert set(extras) - {"all", "dev"} == {row.extra for row in asked.values()}


def test_torch_is_mended_with_its_cpu_build_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "package_version", lambda _name: None)
    assert "-c constraints-cpu.txt -e '.[train]'" in look(BARE)["torch"].mend
    assert "constraints" not in look(H200)["torch"].mend
    # A driver that hangs is there.
    assert "constraints" not in look(replace(BARE, driver_silent=True))["torch"].mend


def test_torch_for_a_newer_cuda_than_the_driver_runs() -> None:
    old = Machine(
        torch_version="2.11.0",
        torch_cuda="13.0",
        gpu_names=("Tesla T4",),
        driver_version="550.54",
        driver_cuda=(12, 4),
    )
    check = look(old)["torch cuda"]
    assert check.status == "warn"
    assert "12.4" in check.found


def test_an_arch_list_that_deepspeed_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 9.0+PTX")
    check = look(H200)["TORCH_CUDA_ARCH_LIST"]
    assert check.status == "warn"
    assert "9.0a" in check.found
    assert "'8.0;9.0;9.0+PTX'" in check.mend
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert look(H200)["TORCH_CUDA_ARCH_LIST"].status == "ok"


def test_a_lock_that_no_build_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert look(BARE)["extension locks"].status == "ok"
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    check = look(BARE)["extension locks"]
    assert check.status == "warn"
    assert check.mend == f"rm {lock}"
    with lock.open():
        assert look(BARE)["extension locks"].status == "ok", "a build has its lock open"


@pytest.mark.parametrize(("release", "status"), [("12.4", "warn"), ("13.1", "ok"), (None, "missing")])
def test_nvcc_against_torch(
    release: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    if release is not None:
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert look(H200)["nvcc"].status == status


def test_a_package_older_than_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "package_version", lambda _name: "0.18.2")
    check = look(BARE)["deepspeed"]
    assert check.status == "warn"
    assert ">=0.19.8,<0.20" in check.found
