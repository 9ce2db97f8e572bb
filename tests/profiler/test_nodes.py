"""Predictions for runs over nodes: shares, second shards, NCCL's buffers, what is between nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmtop.presets.catalog import load_gpu, load_model, load_recipe
from llmtop.presets.cautions import cautions
from llmtop.presets.resolve import Layer, Machine, assemble
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunOptions, RunSpec, ValueSource
from llmtop.profiler.cost.links import links_of, node_bytes_per_second
from llmtop.profiler.cost.steptime import predict_step_seconds, step_time
from llmtop.profiler.cost.sweep import Change, parse_axes, sweep
from llmtop.profiler.cost.where import where
from llmtop.profiler.localrank import local_index
from llmtop.profiler.memory.explain import explain
from llmtop.profiler.memory.nccl import network_bytes
from llmtop.profiler.memory.predict import predict, predict_closely
from llmtop.profiler.memory.result import Component, Moment, Prediction
from llmtop.profiler.memory.sizes import sizes_of

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b", "gpt2")
ZERO = "zero_optimization"
RUNS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(MODELS),
    "gpus": st.sampled_from((1, 2, 4, 8)),
    "nodes": st.integers(2, 64),
    "zero": st.integers(0, 3),
    "precision": st.sampled_from(("bf16", "fp32")),
    "lora_rank": st.sampled_from((0, 16)),
    "grad_accum": st.sampled_from((1, 4)),
}


def run(model: str = "llama-3.1-8b", gpu: str = "h200", hpz: int = 1, **options: Any) -> RunSpec:
    loaded = load_model(model)
    raw: dict[str, Any] = {ZERO: {"zero_hpz_partition_size": hpz}} if hpz > 1 else {}
    return RunSpec(
        name="test",
        options=RunOptions(model=model, gpu=gpu, deepspeed=raw, **options),
        model=loaded.shape,
        gpu=load_gpu(gpu),
        model_source=loaded.source,
        hf_config=loaded.hf_config,
    )


def moment(prediction: Prediction, name: Moment) -> dict[Component, int]:
    return next(one.components for one in prediction.moments if one.name is name)


def held(spec: RunSpec) -> int:
    """Between two steps, on one GPU."""
    return next(one.total_bytes for one in predict(spec).moments if one.name is Moment.STEADY)


def seconds(spec: RunSpec) -> float:
    found = predict_step_seconds(spec)
    assert found is not None
    return found


@given(st.fixed_dictionaries(RUNS))
@settings(deadline=None, max_examples=60)
def test_the_shares_of_all_ranks_of_all_nodes_add_up(options: dict[str, Any]) -> None:
    spec = run(**options)
    assume(not refusals(spec))
    sizes = sizes_of(spec)
    ranks = options["gpus"] * options["nodes"]
    assert sizes.ranks == ranks
    assert sizes.trainable <= sizes.shard * ranks < sizes.trainable + ranks
    if options["zero"]:
        states = moment(predict(spec), Moment.STEADY).get(Component.OPTIMIZER_STATE, 0)
        assert 8 * sizes.trainable <= states * ranks < 8 * (sizes.trainable + ranks)


@given(st.fixed_dictionaries(RUNS), st.integers(1, 64))
@settings(deadline=None, max_examples=60)
def test_on_more_nodes_no_gpu_and_no_host_holds_more(options: dict[str, Any], fewer: int) -> None:
    more = options.pop("nodes")
    assume(fewer < more)
    few, many = (run(**options, nodes=nodes, offload_optimizer="none") for nodes in (fewer, more))
    assume(not refusals(many))
    # From one rank on two, stage 3 gathers, which is not held between steps.
    assert held(many) <= held(few)
    away = {**options, "offload_optimizer": "cpu", "zero": max(1, options["zero"])}
    assert predict(run(**away, nodes=more)).host_bytes <= predict(run(**away, nodes=fewer)).host_bytes


@given(st.fixed_dictionaries(RUNS), st.floats(1, 6400), st.floats(1, 6400))
@settings(deadline=None, max_examples=60)
def test_a_step_never_takes_longer_where_more_goes_between_nodes(
    options: dict[str, Any], one: float, other: float
) -> None:
    slow, fast = sorted((one, other))
    spec = run(**options)
    assume(not refusals(spec))
    assert seconds(run(**options, inter_node_gbps=fast)) <= seconds(run(**options, inter_node_gbps=slow))


@given(st.fixed_dictionaries(RUNS))
@settings(deadline=None, max_examples=40)
def test_more_nodes_of_the_same_work_each_make_no_step_shorter_but_for_what_is_shared(
    options: dict[str, Any],
) -> None:
    """Each GPU does what it did, the links carry more, and only the optimizer has less to do."""
    nodes = options.pop("nodes")
    before, after = (step_time(run(**options, nodes=count)) for count in (nodes, 2 * nodes))
    assert before is not None and after is not None
    assert after.communication >= before.communication
    assert after.arithmetic == before.arithmetic and after.optimizer <= before.optimizer


def test_on_one_node_what_is_between_nodes_changes_nothing_and_that_is_said() -> None:
    assert predict(run(gpus=8, zero=3)) == predict(run(gpus=8, zero=3, inter_node_gbps=10))
    assert any("inter_node_gbps has no effect" in one for one in cautions(run(inter_node_gbps=10)))
    assert not any("inter_node_gbps" in one for one in cautions(run(nodes=2, inter_node_gbps=10)))


def test_a_node_sends_what_its_gpus_are_sold_with_or_what_was_typed() -> None:
    assert node_bytes_per_second(run(gpus=8, nodes=2)) == 8 * 50e9
    assert node_bytes_per_second(run(gpus=8, nodes=2, inter_node_gbps=100)) == 12.5e9
    assert node_bytes_per_second(run(gpus=8)) is None


def test_without_a_figure_there_is_no_step_time_and_it_is_said_how_to_have_one() -> None:
    unknown = predict(run("llama-3.2-1b", "rtx-4090", gpus=2, nodes=2))
    assert unknown.step_seconds is None and unknown.peak_allocated_bytes > 0
    assert any("--inter-node-gbps says it" in one for one in unknown.assumptions)
    known = predict(run("llama-3.2-1b", "rtx-4090", gpus=2, nodes=2, inter_node_gbps=25))
    assert known.step_seconds is not None
    assert any("25 Gb/s from each node to others, as given" in one for one in known.assumptions)


def test_a_ring_over_nodes_goes_at_the_rate_of_the_slower_link_and_pays_for_its_hops() -> None:
    links = links_of(run(gpus=8, nodes=4, inter_node_gbps=800))
    assert links.between is not None
    # 28 hops within nodes and 3 between them.
    assert links.latency == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 3 * 14e-6)
    assert links.collective(1e9) == pytest.approx(1e9 / links.between + links.latency)
    assert links.collective(1e9, ranks=8) == pytest.approx(1e9 / links.inside)
    wide = links_of(run(gpus=8, nodes=4, inter_node_gbps=80_000))
    assert wide.collective(1e9, 0) == pytest.approx(1e9 / wide.inside)


def test_second_shards_are_there_but_between_two_steps() -> None:
    plain, second = (predict(run(gpus=8, nodes=4, zero=3, hpz=hpz)) for hpz in (1, 8))
    more = 2 * -(-plain.trainable_params // 8)
    for name in Moment:
        before, after = (moment(one, name)[Component.PARAMETERS] for one in (plain, second))
        assert after - before == (0 if name is Moment.STEADY else more), name


def test_second_shards_spare_the_network_and_never_cost_time() -> None:
    plain, second = (seconds(run(gpus=8, nodes=4, zero=3, hpz=n, inter_node_gbps=100)) for n in (1, 8))
    # Of two gathers and a reduction over the network one gather is left out.
    assert second < 0.75 * plain
    several = [
        seconds(run(gpus=8, nodes=4, zero=3, hpz=n, inter_node_gbps=100, grad_accum=4)) for n in (1, 8)
    ]
    assert several[1] < 0.55 * several[0]
    assert seconds(run(gpus=8, zero=3, hpz=8)) <= seconds(run(gpus=8, zero=3))


def test_second_shards_of_frozen_weights_are_never_dropped() -> None:
    plain, second = (predict(run(gpus=8, nodes=2, zero=3, lora_rank=16, hpz=hpz)) for hpz in (1, 8))
    steady = [moment(one, Moment.STEADY)[Component.PARAMETERS] for one in (plain, second)]
    assert steady[1] - steady[0] >= 2 * plain.params // 8


def test_second_shards_lie_on_the_host_where_the_first_do() -> None:
    away: dict[str, Any] = {
        "gpus": 8,
        "nodes": 2,
        "zero": 3,
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
    }
    plain, second = (predict(run(**away, hpz=hpz)) for hpz in (1, 8))
    assert second.peak_allocated_bytes == plain.peak_allocated_bytes
    assert second.pinned_bytes - plain.pinned_bytes >= 2 * plain.params


@given(st.integers(2, 4096), st.integers(2, 4096))
def test_nccl_takes_no_less_for_more_nodes_and_nothing_on_one(one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert 0 < network_bytes(run(gpus=8, nodes=few)) <= network_bytes(run(gpus=8, nodes=many))
    assert network_bytes(run(gpus=8)) == 0


def test_the_verdict_counts_what_nccl_takes_for_other_nodes() -> None:
    one, four = (predict(run("llama-3.2-1b", gpus=8, nodes=nodes, zero=0)) for nodes in (1, 4))
    assert one.needed_bytes is not None and four.needed_bytes is not None
    assert four.needed_bytes - one.needed_bytes == network_bytes(run(gpus=8, nodes=4))
    assert four.peak_allocated_bytes == one.peak_allocated_bytes


def test_every_byte_of_a_run_over_nodes_is_explained() -> None:
    spec = run(gpus=8, nodes=4, zero=3, hpz=8)
    terms = [term for one in explain(spec).verdict for term in one.terms]
    assert any(term.label.startswith("NCCL's buffers to other nodes") for term in terms)
    parts = [term for one in explain(spec).moments for part in one.components for term in part.terms]
    assert any(term.label == "second shards of trained weights" for term in parts)
    assert any("(8 GPUs x 4 nodes)" in term.formula for term in parts)
    assert predict_closely(spec).peak_reserved_bytes[1] >= predict(spec).peak_allocated_bytes


def typed(change: Change, **options: Any) -> RunSpec:
    layers = [Layer(ValueSource.COMMAND_LINE, "typed", options), Layer(ValueSource.MACHINE, "", change)]
    return assemble(layers, name="asked", machine=Machine(gpu="cpu", gpus=1, host_memory_bytes=None))


def test_a_sweep_takes_nodes_and_what_is_between_them() -> None:
    axes = parse_axes("nodes=1..4,inter-node-gbps=100|400")
    found = sweep(axes, lambda change: typed(change, model="llama-3.1-8b", gpu="h200", gpus=8, zero=3))
    assert found.candidates == len(found.rows) == 6
    rates = {
        (r.settings["nodes"], r.settings["inter_node_gbps"]): r.brief.tokens_per_second for r in found.rows
    }
    assert rates[4, 400.0] > rates[4, 100.0] and rates[1, 400.0] == rates[1, 100.0]  # type: ignore[operator]


def test_where_keeps_the_nodes_that_were_typed_and_no_others() -> None:
    asked: dict[str, Any] = {"model": "llama-3.1-70b"}
    (one,) = where(lambda change: typed(change, **asked), gpus=("a100-80gb",)).rows
    (four,) = where(lambda change: typed(change, **asked, nodes=4), gpus=("a100-80gb",)).rows
    assert (one.gpus, one.nodes) == (None, 1)
    assert four.gpus is not None and four.nodes == 4 and four.brief is not None
    assert four.kwh_per_million_tokens is not None
    watts = load_gpu("a100-80gb").board_power_watts or 0
    rate = four.brief.tokens_per_second or 0
    assert four.kwh_per_million_tokens == pytest.approx(watts * 4 * four.gpus / rate / 3.6)


def test_every_figure_of_a_network_has_its_source() -> None:
    for name in ("h200", "h100-80gb", "a100-40gb", "a100-80gb", "b200", "v100-16gb", "v100-32gb"):
        gpu = load_gpu(name)
        assert gpu.network_bytes_per_second is not None
        assert "datasheet" in gpu.sources["network_bytes_per_second"]
    assert load_gpu("t4").network_bytes_per_second is None
    assert load_recipe("full-zero3").values.get("inter_node_gbps") is None


def test_a_shard_is_of_all_ranks_where_nodes_have_not_as_many_gpus() -> None:
    uneven, even = (predict(run(gpus=8, nodes=2, zero=3, total_gpus=n)) for n in (12, 16))
    assert uneven.peak_allocated_bytes > even.peak_allocated_bytes
    assert even == predict(run(gpus=8, nodes=2, zero=3))
    assert any("the one with most GPUs, 8" in one for one in uneven.assumptions)
    spec = run(gpus=8, nodes=2, zero=3, total_gpus=12)
    assert local_index(spec, range(8, 12), 10) == 2
    assert local_index(spec, range(10, 11), 10) is None, "opened by itself, it may be any of its machine's"
    assert local_index(spec, range(1), 0) == 0
    assert local_index(run(gpus=8, nodes=2), range(10, 11), 10) == 2
    assert spec.global_batch == 12 * spec.options.micro_batch * spec.options.grad_accum
