"""`plan` and `presets`: the contract of the JSON, and the text that a person reads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.presets.presetfiles import BUILT_IN
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.units import format_bytes, format_tokens_rate
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import CommandParser
from llmtop.tui.commands import output
from llmtop.tui.commands.plan_text import plan_text
from tests.cli.conftest import Llmtop

FAR_AWAY = ("--zero", "3", "--offload-optimizer", "cpu", "--offload-param", "cpu")
LLAMA = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--zero", "3")

KEYS = {
    "schema_version",
    "params",
    "trainable_params",
    "fits",
    "peak_allocated_bytes",
    "peak_allocated_upper_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
    "host_bytes",
    "pinned_bytes",
    "nvme_bytes",
    "step_seconds",
    "tokens_per_second",
    "moments",
    "peak_moment",
    "suggestions",
    "assumptions",
    "spec",
    "inputs",
    "host_fits",
}
"""What scripts may rely on; more may come."""


def resolved(*words: str) -> RunSpec:
    parser = CommandParser("plan", "", "plan", "plan")
    options.add_run_arguments(parser)
    return options.resolve_run(parser.parse(words))


@pytest.mark.parametrize("words", [("cpu-demo",), LLAMA, (*LLAMA, "--offload-optimizer", "cpu")])
def test_plan_json_is_one_object_with_every_key(words: tuple[str, ...], llmtop: Llmtop) -> None:
    answer = llmtop("plan", *words, "--json")
    assert answer.code == ExitCode.DONE
    plan: dict[str, Any] = answer.json()
    assert set(plan) >= KEYS
    assert plan["schema_version"] == 1
    byte_keys = [key for key in plan if key.endswith("_bytes") and key != "peak_reserved_bytes"]
    assert all(plan[key] is None or type(plan[key]) is int for key in byte_keys)
    low, high = plan["peak_reserved_bytes"]
    assert plan["peak_allocated_bytes"] <= low <= high
    assert plan["peak_allocated_bytes"] <= plan["peak_allocated_upper_bytes"]


def test_moments_add_up_and_the_peak_is_the_largest(llmtop: Llmtop) -> None:
    plan = llmtop("plan", *LLAMA, "--json").json()
    totals = {moment["name"]: moment["total_bytes"] for moment in plan["moments"]}
    for moment in plan["moments"]:
        assert sum(moment["components"].values()) == moment["total_bytes"]
        assert set(moment["components"]) <= set(Component)
    assert set(totals) <= set(Moment)
    assert totals[plan["peak_moment"]] == max(totals.values()) == plan["peak_allocated_bytes"]


def test_plan_text_shows_verdict_moments_and_sources(llmtop: Llmtop) -> None:
    answer = llmtop("plan", *LLAMA)
    assert answer.code == ExitCode.DONE
    assert "verdict: " in answer.out
    for word in ("parameters", "optimizer state", "total", "host memory", "taken for granted", "--zero 3"):
        assert word in answer.out
    assert max(map(len, answer.out.splitlines())) <= 100


def test_plan_of_a_run_that_does_not_fit_is_an_answer_and_names_a_way(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.1-70b", "--gpu", "rtx-4090", "--gpus", "1")
    plan = llmtop("plan", *words, "--json")
    assert plan.code == ExitCode.DONE
    assert plan.json()["fits"] is False
    assert "does not fit" in llmtop("plan", *words).out


def test_run_refuses_what_does_not_fit(llmtop: Llmtop) -> None:
    answer = llmtop("run", "--model", "llama-3.1-70b", "--gpu", "cpu", "--gpus", "1", "--precision", "fp32")
    assert answer.code == ExitCode.DOES_NOT_FIT
    assert "--force" in answer.err
    assert answer.out == ""
    assert llmtop("ls", "--json").json()["runs"] == []


@pytest.mark.parametrize(
    ("kind", "known"), [("models", "llama-3.1-8b"), ("gpus", "h200"), ("recipes", "cpu-demo")]
)
def test_presets_say_which_file_each_comes_from(kind: str, known: str, llmtop: Llmtop) -> None:
    listed = llmtop("presets", kind, "--json").json()["presets"]
    assert {line["kind"] for line in listed} == {kind}
    line = next(line for line in listed if line["name"] == known)
    assert line["file"].endswith(f"{known}.toml")
    assert known in llmtop("presets").out


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        ("models", "llama-3.1-8b", "num_layers"),
        ("gpus", "h200", "memory_bytes"),
        ("recipes", "cpu-demo", "zero"),
    ],
)
def test_a_preset_shows_its_values_and_sources(kind: str, name: str, key: str, llmtop: Llmtop) -> None:
    detail = llmtop("presets", kind, name, "--json").json()
    assert detail["values"][key] is not None
    assert detail["sources"][key]
    assert key in llmtop("presets", kind, name).out


def test_presets_of_an_unknown_kind(llmtop: Llmtop) -> None:
    answer = llmtop("presets", "model")
    assert answer.code == ExitCode.USAGE
    assert "did you mean 'models'?" in answer.err
    named = llmtop("presets", "llama-3.1-8b")
    assert named.code == ExitCode.USAGE and "llmtop presets models llama-3.1-8b" in named.err


@pytest.mark.parametrize("words", [("cpu-demo",), LLAMA, ("zero3-offload", "--gpu", "h200")])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_plan_keeps_to_the_width(words: tuple[str, ...], width: int) -> None:
    spec = resolved(*words)
    text = plan_text(spec, predict_with_suggestions(spec), width)
    assert all(len(line) <= width or " " not in line.strip() for line in text.splitlines())
    assert sum("total" in line.split()[:1] for line in text.splitlines()) >= 1
    for name in ("weights", "data", "tokenizer"):
        assert f"\n  {name} " in text


def test_a_terminal_is_filled_and_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert output.text_width() == output.WIDTH, "not a terminal"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert output.text_width() == 72


def test_plan_json_has_the_resolved_run(llmtop: Llmtop) -> None:
    plan = llmtop("plan", *LLAMA, "--json").json()
    assert plan["spec"]["options"]["gpus"] == 8
    assert plan["spec"]["gpu"]["name"] == "h100-80gb"
    assert plan["spec"]["model"]["num_layers"] == 32
    assert plan["inputs"]["weights"].startswith("random")


def test_plan_refuses_the_raw_keys_that_run_refuses(llmtop: Llmtop) -> None:
    word = "deepspeed.zero_optimization.reduce_bucket_sizee=2e8"
    for command in ("plan", "run"):
        answer = llmtop(command, "cpu-demo", "--set", word)
        assert answer.code == ExitCode.USAGE
        assert "reduce_bucket_size" in answer.err


def test_without_a_gpu_plan_says_what_it_planned_for(llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Machine(gpu="cpu", gpus=1, host_memory_bytes=2**34)
    monkeypatch.setattr("llmtop.profiler.hardware.machine.detect_machine", lambda: bare)
    unasked, asked = (llmtop("plan", "--model", "llama-3.1-8b", *words) for words in ((), ("--gpu", "cpu")))
    assert "--gpu NAME" in unasked.err and "--gpu" not in asked.err
    assert "on 1 x cpu (this machine has no GPU)" in unasked.out.splitlines()[0]
    assert "no GPU" not in asked.out.splitlines()[0]
    # What a recipe asks for and a CPU has not is refused for that reason too.
    refused = llmtop("plan", "long-context-16k", "--model", "llama-3.1-8b")
    assert refused.code == ExitCode.USAGE and refused.err.startswith("error: this machine has no GPU: ")
    assert llmtop(
        "plan", "--model", "llama-3.1-8b", "--attention", "flash_attention_2", "--gpu", "cpu"
    ).err.startswith("error: attention")


def test_a_model_in_the_place_of_a_recipe(llmtop: Llmtop) -> None:
    assert llmtop("plan", "llama-3.1-8b", "--gpu", "h200").out.startswith("custom: llama-3.1-8b on 1 x h200")
    both = llmtop("plan", "llama-3.1-8b", "--model", "gpt2")
    assert both.code == ExitCode.USAGE and "that is a model" in both.err
    slip = llmtop("plan", "lama-3.1-8b")
    assert slip.code == ExitCode.USAGE and "did you mean 'llama-3.1-8b'?" in slip.err


def test_fixes_are_options(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "--model", "gpt2", "--gpu", "t4", "--precision", "bf16")
    assert "fix: --precision fp16" in answer.err


def test_a_broken_preset_of_the_user_is_listed(llmtop: Llmtop, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "llmtop" / "presets" / "recipes"
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text("zero = \n")
    (folder / "good.toml").write_text('model = "gpt2"\n')
    answer = llmtop("presets", "recipes")
    assert answer.code == ExitCode.DONE
    assert "broken: " in answer.out and "cpu-demo" in answer.out and "good.toml" in answer.out
    listed = {line["name"]: line for line in llmtop("presets", "--json").json()["presets"]}
    assert "not valid TOML" in listed["bad"]["error"]
    assert not listed["good"]["error"] and not listed["cpu-demo"]["error"]
    assert llmtop("plan", "cpu-demo").code == ExitCode.DONE
    assert llmtop("plan", "good", "--gpu", "h200").code == ExitCode.DONE


@pytest.mark.parametrize("words", [(), ("models",), ("models", "llama-3.1-8b"), ("recipes", "zero3-offload")])
def test_presets_keep_to_the_width_and_name_a_folder_once(words: tuple[str, ...], llmtop: Llmtop) -> None:
    lines = llmtop("presets", *words).out.splitlines()
    assert all(len(line) <= output.WIDTH for line in lines if "/llmtop" not in line)
    assert sum(str(BUILT_IN) in line for line in lines) <= 1


def test_kernels_and_layers_that_are_chosen_stand_in_the_plan(llmtop: Llmtop) -> None:
    words = ("--liger", "--liger-kernels", "swiglu, rope", "--gradient-checkpointing")
    shown = llmtop("plan", *LLAMA, *words, "--set", "checkpointing_every=2").out
    assert "gradient checkpointing of one layer in 2" in shown and "liger: rope, glu\n" in shown
    plain = llmtop("plan", *LLAMA, "--liger", "--gradient-checkpointing").out
    assert "gradient checkpointing, liger\n" in plain
    refused = llmtop("plan", *LLAMA, "--liger-kernels", "rope")
    assert refused.code == ExitCode.USAGE and "--liger" in refused.err


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_verdict_near_the_limit_says_so(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "h200", "--gpus", "2", "--zero", "3", "--seq-len", "4224")
    tight = llmtop("plan", *words, "--liger", "--micro-batch", "4")
    assert "verdict: fits, but tight: each GPU needs up to 138 GiB of 140 GiB" in tight.out
    roomy = llmtop("plan", *words, "--liger", "--micro-batch", "1")
    assert "verdict: fits, each GPU" in roomy.out


def test_a_reserved_figure_above_the_need_is_explained(llmtop: Llmtop) -> None:
    plan = llmtop("plan", *LLAMA, "--json").json()
    most = max(plan["peak_reserved_bytes"][1], plan["peak_device_bytes"])
    explained = "which the allocator gives back before" in one_line(llmtop("plan", *LLAMA).out)
    assert explained == (most > plan["needed_bytes"])


def test_every_way_out_is_given_as_options_that_lead_to_it(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.2-1b", "--gpu", "rtx-4090", "--gpus", "2", "--micro-batch", "4")
    plan = llmtop("plan", *words, "--json").json()
    spec = resolved(*words)
    assert plan["fits"] is False and plan["suggestions"]
    for suggestion in plan["suggestions"]:
        typed = options.change_text(spec, suggestion["change"])
        again = llmtop("plan", *words, *shlex.split(typed), "--json").json()
        assert again["peak_allocated_bytes"] == suggestion["peak_allocated_bytes"]
        assert typed in one_line(llmtop("plan", *words).out)


def test_an_offload_that_changes_the_stage_says_so(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "1", "--zero", "0")
    plan = llmtop("plan", *words, "--json")
    for suggestion in plan.json()["suggestions"]:
        stage = suggestion["change"].get("zero", 0)
        assert stage == 0 or f"ZeRO-{stage}" in suggestion["text"]


def test_on_a_cpu_nothing_is_moved_to_the_cpu_and_packages_are_named(llmtop: Llmtop) -> None:
    plan = llmtop("plan", "--model", "llama-3.1-8b", "--gpu", "cpu", "--gpus", "2", "--json").json()
    texts = [suggestion["text"] for suggestion in plan["suggestions"]]
    assert not any("on the CPU" in text for text in texts)
    assert all("needs" in text for text in texts if "LoRA" in text or "8-bit" in text)


@pytest.mark.parametrize(
    ("words", "caution"),
    [
        (("--seq-len", "200000"), "was made for 131,072 positions"),
        (("--gpus", "16"), "--nodes 2 --gpus 8"),
        (("--data", "nothere.txt"), "nothere.txt does not exist on this machine"),
        (("--set", "deepspeed.compile.deepcompile=true"), "deepspeed.compile has no effect here"),
        (("--set", "deepspeed.activation_checkpointing.cpu_checkpointing=true"), "--gradient-checkpointing"),
        (
            ("--zero", "3", "--set", "deepspeed.zero_optimization.zero_quantized_gradients=true"),
            "zero_quantized_gradients has no effect here: on one node",
        ),
        (("--tokenizer", "no/folder"), "no/folder does not exist on this machine"),
    ],
)
def test_what_is_likely_not_meant_is_noted(words: tuple[str, ...], caution: str, llmtop: Llmtop) -> None:
    answer = llmtop("plan", *LLAMA, *words)
    assert answer.code == ExitCode.DONE
    note = one_line(answer.out).index("note: ")
    assert caution in one_line(answer.out)[note:]
    assert any(caution in line for line in llmtop("plan", *LLAMA, *words, "--json").json()["cautions"])
    assert "note: " not in llmtop("plan", *LLAMA).out


@pytest.mark.parametrize(
    ("given", "words"), [(("--gradient-checkpointing",), "no checkpointing"), (FAR_AWAY, "no offload")]
)
def test_a_change_says_by_how_much_it_is_faster(given: tuple[str, ...], words: str, llmtop: Llmtop) -> None:
    """As its own plan and that of the run say: it was "several times" for every one."""
    asked = ("--model", "llama-3.2-1b", "--gpu", "h200", "--gpus", "1", *given)
    plan = llmtop("plan", *asked, "--json").json()
    (found,) = (one for one in plan["suggestions"] if one["text"].startswith(words))
    factor = found["tokens_per_second"] / plan["tokens_per_second"]
    assert f"{words} ({factor:.1f}x faster)" == found["text"] and factor > 1.05


def test_values_are_written_as_they_are_typed(llmtop: Llmtop) -> None:
    text = llmtop("plan", "full-zero3", "--model", "llama-3.1-8b", "--gpu", "h200").out
    assert "gradient_checkpointing true" in one_line(text) and "learning_rate 1e-5" in one_line(text)
    assert output.value_text(None) == "none" and output.value_text(2e20) == "2e20"
    assert output.value_text(1e-05) == "1e-5" and output.value_text(0.1) == "0.1"


def test_weights_beside_a_configuration_are_not_said_to_be_none(llmtop: Llmtop, tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    shape = {"model_type": "gpt2", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    alone = llmtop("plan", "--model", str(tmp_path / "config.json"), "--gpu", "h200")
    assert "there are none with config.json" in one_line(alone.out)
    (tmp_path / "model.safetensors").touch()
    beside = llmtop("plan", "--model", str(tmp_path / "config.json"), "--gpu", "h200")
    assert f"not read; for them --model {tmp_path})" in one_line(beside.out)


def test_what_is_reserved_is_told_once_where_both_ends_are_written_alike(llmtop: Llmtop) -> None:
    asked = ("plan", "full-zero2", "--model", "qwen2.5-3b", "--gpu", "rtx-4090", "--gpus", "2")
    ends = {format_bytes(size) for size in llmtop(*asked, "--json").json()["peak_reserved_bytes"]}
    assert len(ends) == 1 and f"  peak reserved   {ends.pop()}\n" in llmtop(*asked).out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_verdict_on_a_machine_without_gpus_is_explained_by_parts_that_add_up(
    llmtop: Llmtop, ranks: int
) -> None:
    asked = ("plan", "lora", "--model", "qwen2.5-3b", "--gpu", "cpu", "--gpus", str(ranks))
    found, told = llmtop(*asked, "--json").json(), one_line(llmtop(*asked).out)
    peak, (likely, most) = found["peak_allocated_bytes"], found["peak_reserved_bytes"]
    assert found["needed_bytes"] == ranks * most
    of_each = "" if ranks == 1 else " of each of 2 processes"
    assert (
        f"The verdict counts {format_bytes(most)}{of_each}: the peak of the table below,"
        f" {format_bytes(likely - peak)} of freed memory that the heap keeps in pieces" in told
    )
    assert f"and {format_bytes(most - likely)} of margin." in told


def test_ways_to_make_it_fit_say_what_the_verdict_compares(llmtop: Llmtop) -> None:
    """And that it is the GPU's memory which falls, not the host's."""
    asked = ("plan", "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--seq-len", "131072")
    words = one_line(llmtop(*asked).out)
    assert "nothing here makes it fit" in words
    found = llmtop(*asked, "--json").json()["suggestions"]
    assert found and not any(one["fits"] for one in found)
    for one in found:
        assert f"-> {format_bytes(one['needed_bytes'])}, does not fit yet" in words
    far = ("plan", "--model", "llama-3.1-70b", "--gpu", "rtx-4090")
    moved = llmtop(*far, *FAR_AWAY, "--gradient-checkpointing", "--json").json()
    need, host = (format_bytes(moved[key]) for key in ("needed_bytes", "host_bytes"))
    assert f"-> {need}, host memory {host}, fits" in one_line(llmtop(*far).out)


def test_host_memory_is_compared_with_what_this_machine_has(
    llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run would be on it: of another machine nothing is known."""
    small = Machine(gpu="rtx-4090", gpus=1, host_memory_bytes=64 * 2**30)
    monkeypatch.setattr("llmtop.profiler.hardware.machine.detect_machine", lambda: small)
    monkeypatch.setattr("llmtop.tui.commands.plan._DRIVERS", ("/dev/null",))
    for place in ("profiler.hardware.hostroom", "tui.commands.run"):
        monkeypatch.setattr(f"llmtop.{place}.host_memory_bytes", lambda: small.host_memory_bytes)
    model = ("--model", "llama-3.1-8b", "--gradient-checkpointing")
    here, far = ("--gpu", "rtx-4090"), ("--gpu", "rtx-3090")
    moved = llmtop("plan", *model, *here, *FAR_AWAY, "--json").json()
    assert (moved["fits"], moved["host_fits"]) == (True, False)
    short = f"needs {format_bytes(moved['host_bytes'])} of host memory, and there is 64.0 GiB here"
    assert f"verdict: does not fit, it {short}" in one_line(llmtop("plan", *model, *here, *FAR_AWAY).out)
    assert "does not fit the 64.0 GiB here" in one_line(llmtop("plan", *model, *here).out)
    refused = llmtop("run", *model, *here, *FAR_AWAY)
    assert refused.code == ExitCode.DOES_NOT_FIT and short in one_line(refused.err)
    assert llmtop("ls", "--json").json()["runs"] == []
    assert llmtop("plan", *model, *far, *FAR_AWAY, "--json").json()["host_fits"] is None
    assert "GiB here" not in llmtop("plan", *model, *far, *FAR_AWAY).out
    large = Machine(gpu="rtx-4090", gpus=1, host_memory_bytes=2**40)
    monkeypatch.setattr("llmtop.profiler.hardware.machine.detect_machine", lambda: large)
    monkeypatch.setattr("llmtop.profiler.hardware.hostroom.host_memory_bytes", lambda: 2**40)
    assert llmtop("plan", *model, *here, *FAR_AWAY, "--json").json()["host_fits"] is True


def test_a_way_that_fits_is_called_what_its_own_plan_calls_it(llmtop: Llmtop) -> None:
    """A way said "fits" whose plan then said "fits, but tight"."""
    asked = ("plan", "--model", "qwen2.5-7b", "--gpu", "a100-40gb", "--gpus", "4")
    found = llmtop(*asked, "--json").json()["suggestions"]
    assert {one["tight"] for one in found} == {True, False}
    words = one_line(llmtop(*asked).out)
    for one in found:
        options_of_it = options.change_text(resolved(*asked[1:]), one["change"])
        verdict = "fits, but tight" if one["tight"] else "fits"
        assert f"{verdict}, {format_tokens_rate(one['tokens_per_second'])} {options_of_it}" in words
        assert f"verdict: {verdict}" in one_line(llmtop(*asked, *shlex.split(options_of_it)).out)
