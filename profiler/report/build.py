"""Makes one run's report from its record."""

from __future__ import annotations

import shlex
from statistics import median

from llmtop.presets.inputs import inputs
from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import Breakdown, breakdown
from llmtop.profiler.cost.flops import peak_flops_per_second, utilisation
from llmtop.profiler.effects.switches import Measured, measure, read_others, switches
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.ending import ending, not_saved_words
from llmtop.profiler.fold.modelname import model_words
from llmtop.profiler.fold.rankstate import WARMUP_STEPS, RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import mean_rate, middle_half, steady_steps
from llmtop.profiler.gpuwords import gpu_words
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.oom.diagnosis import diagnose
from llmtop.profiler.oom.message import short_message
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.imported import imported_words
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir
from llmtop.profiler.report.changes import changes_of
from llmtop.profiler.report.contents import (
    ComponentReport,
    DeviceReport,
    HostReport,
    PhaseReport,
    RankReport,
    Report,
    StageReport,
)
from llmtop.profiler.report.earlier import with_earlier
from llmtop.profiler.report.hosts import HostsFound, hosts_found
from llmtop.profiler.report.quantized import quantized_of
from llmtop.profiler.report.snapshots import snapshots_of


def build_report(run: RunDir) -> Report:
    """Read everything that the run's folder says now."""
    state = read_state(run)
    return report_of(run, state, read_others(run, state.host))


def report_of(
    run: RunDir, state: RunState, others: tuple[Measured, ...] = (), *, stands_out: bool = True
) -> Report:
    """`others` are the runs that its switches are compared with. What stands out, and each host, may be left
    out: for them the record is read once more, and that of the hosts."""
    setting = state.changes.setting
    spec, prediction = run.spec(setting), run.prediction(setting)
    found = breakdown(state, spec, prediction)
    first = state.first
    built = first.model if first else None
    steady = steady_steps(state.setting_series, WARMUP_STEPS)
    tokens_per_second = mean_rate(steady)
    share = utilisation(spec, tokens_per_second)
    end = ending(state)
    hosts = HostsFound()
    if stands_out:
        hosts = hosts_found(run, state, with_earlier(run, state, findings(state, spec, prediction)))
    # The clock of another host may be far from that of the one that began and ended the run.
    ended = state.ended.t if state.ended is not None else state.now
    return Report(
        run_id=run.run_id,
        name=spec.name,
        status=state.status,
        reason=end.reason,
        fix=end.fix,
        imported=imported_words(run),
        host=state.host,
        model=model_words(spec, state),
        params=built.params if built else prediction.params,
        trainable_params=built.trainable_params if built else prediction.trainable_params,
        gpu=gpu_words(spec),
        device_kind=spec.gpu.kind,
        world_size=spec.world_size,
        zero=spec.options.zero if spec.knows("zero") else None,
        precision=_known(spec, "precision"),
        optimizer=(built.optimizer if built else None) or _known(spec, "optimizer"),
        engine_optimizer=built.engine_optimizer if built else None,
        attention=(built.attention if built else None) or _known(spec, "attention"),
        inputs=inputs(spec),
        command="" if spec.script is None else shlex.join(spec.script.command),
        not_predicted=_not_predicted(spec, state),
        tokens_per_step=_tokens_per_step(spec, state),
        started=state.started,
        ended=ended,
        seconds=state.seconds_until(ended),
        paused_seconds=state.paused_seconds,
        steps_planned=spec.steps_planned,
        steps_finished=state.steps_finished,
        steps_made=state.steps_made,
        skipped_steps=state.skipped_steps,
        first_loss_scale=state.first_loss_scale,
        last_loss_scale=first.last_step.loss_scale if first is not None and first.last_step else None,
        first_loss=state.first_loss,
        last_loss=state.present_loss,
        step_seconds=median(seconds for seconds, _ in steady) if steady else None,
        step_spread=middle_half(steady),
        predicted_step_seconds=prediction.step_seconds,
        tokens_per_second=tokens_per_second,
        predicted_tokens_per_second=prediction.tokens_per_second,
        mfu_percent=100 * share.mfu if share else None,
        needed_mfu_percent=100 * share.needed if share else None,
        peak_flops_per_second=peak_flops_per_second(spec) if spec.is_known else None,
        phases=_phases(first),
        phase_steps=first.told_steps if first is not None else 0,
        untold_phase_steps=first.untold_steps if first is not None else 0,
        startup=_startup(state),
        components=_components(found),
        predicted_peak_bytes=found.predicted_peak_bytes,
        predicted_peak_upper_bytes=prediction.peak_allocated_upper_bytes,
        predicted_held_upper_bytes=prediction.peak_reserved_bytes[1],
        actual_peak_bytes=found.actual_peak_bytes,
        peak_error_percent=found.error_percent,
        unexplained_bytes=found.unexplained_bytes,
        unexplained_percent=found.unexplained_percent,
        predicted_moment=found.predicted_moment,
        actual_moment=found.actual_moment,
        peak_is_seen=found.peak_is_seen,
        not_yet_measured=found.not_yet,
        peak_rank=found.peak_rank,
        peak_phase=found.peak_phase,
        predicted_device_bytes=found.predicted_device_bytes,
        actual_device_bytes=found.actual_device_bytes,
        devices=_devices(state),
        joules_per_token=state.energy.joules_per_token,
        host_memory=_host(state, prediction),
        hosts=hosts.rows,
        ranks=tuple(_rank(state, rank) for _, rank in sorted(state.ranks.items())),
        checkpoints=state.checkpoints,
        checkpoints_refused=state.checkpoints_refused,
        not_saved=not_saved_words(state, spec),
        snapshots=snapshots_of(run, state),
        quantized=quantized_of(run),
        changes=changes_of(state),
        out_of_memory=diagnose(state, spec, prediction),
        findings=hosts.findings,
        switches=switches(measure(run.run_id, spec, state, prediction), first, others),
        kernels=first.kernels if first else None,
        versions={"llmtop": state.llmtop_version, **(built.versions if built else {})},
        files=_files(run, spec),
        skipped_lines=state.skipped_lines,
        thinned_events=sum(one.left_out for one in state.thinned.values()),
        thinned_until=max((one.t for one in state.thinned.values()), default=None),
    )


def _known(spec: RunSpec, option: str) -> str | None:
    return str(getattr(spec.options, option)) if spec.knows(option) else None


def _tokens_per_step(spec: RunSpec, state: RunState) -> int | None:
    """A script's are those of its newest step: until it is described nobody has said how many there are."""
    if spec.is_known:
        return spec.tokens_per_step
    newest = state.recent_steps[-1] if state.recent_steps else None
    return (newest.tokens or None) if newest is not None else None


def _not_predicted(spec: RunSpec, state: RunState) -> str:
    if spec.script is None or spec.script.described:
        return ""
    told = state.description.problem if state.description is not None else ""
    if told or not state.steps_finished:
        return told or "no training has been seen in it"
    return "its model has no configuration that llmtop knows the shape of, or its batches are no tokens"


def _phases(rank: RankState | None) -> tuple[PhaseReport, ...]:
    totals = rank.phase_totals if rank else {}
    means = {phase: total.seconds / total.steps for phase, total in totals.items() if total.steps}
    whole = sum(means.values())
    return tuple(
        PhaseReport(phase=phase, seconds=seconds, percent=100 * seconds / whole if whole else 0.0)
        for phase, seconds in means.items()
    )


def _startup(state: RunState) -> tuple[StageReport, ...]:
    """Each stage as the slowest rank went through it, in the order of their beginning."""
    slowest: dict[str, StageReport] = {}
    for number, rank in sorted(state.ranks.items()):
        for stage in rank.stages:
            known = slowest.get(stage.stage)
            longer = known is not None and (
                known.seconds is not None and (stage.seconds is None or stage.seconds > known.seconds)
            )
            if known is None or longer:
                slowest[stage.stage] = StageReport(stage=stage.stage, seconds=stage.seconds, rank=number)
    return tuple(slowest.values())


def _components(found: Breakdown) -> tuple[ComponentReport, ...]:
    """All rows but the remainder, which is `unexplained_bytes`."""
    return tuple(
        ComponentReport(
            component=row.component,
            predicted_bytes=row.predicted_bytes,
            actual_bytes=row.actual_bytes,
            error_percent=row.error_percent,
            in_peak=row.in_peak,
        )
        for row in found.rows
        if row.component != "unexplained"
    )


def _devices(state: RunState) -> tuple[DeviceReport, ...]:
    return tuple(
        DeviceReport(
            index=device.index,
            name=device.name,
            peak_bytes=state.peak_device_bytes.get(device.index),
            total_bytes=device.memory_total_bytes,
            energy_joules=state.energy.joules.get(device.index),
        )
        for device in (state.hardware_history[-1].devices if state.hardware_history else ())
    )


def _host(state: RunState, prediction: Prediction) -> HostReport:
    host = state.hardware_history[-1].host if state.hardware_history else None
    return HostReport(
        predicted_bytes=prediction.host_bytes if prediction.is_known else None,
        ranks_pss_bytes=sum(state.peak_pss_bytes.values()) if state.peak_pss_bytes else None,
        compilers_peak_bytes=sum(state.peak_compiler_bytes.values()) or None,
        peak_bytes=state.peak_host_bytes,
        total_bytes=host.memory_total_bytes if host else None,
        cgroup_peak_bytes=state.peak_cgroup_bytes,
        cgroup_limit_bytes=host.cgroup_limit_bytes if host else None,
        swap_peak_bytes=state.peak_swap_bytes,
    )


def _rank(state: RunState, rank: RankState) -> RankReport:
    peaks = [memory.peak_bytes for memory in rank.peaks.values() if memory.peak_bytes is not None]
    failure = None
    if rank.failed is not None:
        failure = f"{rank.failed.error_type}: {short_message(rank.failed.message)}"
    return RankReport(
        rank=rank.rank,
        pid=rank.pid,
        last_step=state.step_of(rank),
        exit_code=rank.exited.exit_code if rank.exited else None,
        signal=rank.exited.signal if rank.exited else None,
        peak_bytes=max(peaks, default=None),
        peak_rss_bytes=state.peak_rss_bytes.get(rank.rank),
        peak_pss_bytes=state.peak_pss_bytes.get(rank.rank),
        failure=failure,
    )


def _files(run: RunDir, spec: RunSpec) -> dict[str, str]:
    """Where the rest is; only what exists."""
    places = {
        "run": run.path,
        "spec": run.spec_path,
        "prediction": run.prediction_path,
        "deepspeed": run.deepspeed_path,
        "supervisor_events": run.events_path(SUPERVISOR),
        "hardware_events": run.events_path(HARDWARE),
        "supervisor_log": run.log_path(SUPERVISOR),
        **{f"rank_{rank}_log": run.log_path(rank) for rank in range(spec.world_size)},
    }
    return {name: str(path) for name, path in places.items() if path.exists()}
