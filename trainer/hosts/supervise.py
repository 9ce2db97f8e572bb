"""The supervisor of one host: `python -m llmtop.trainer.hosts.supervise RUNDIR HOST OFFSET`.

Starts the ranks of its host as the lead orders (`orders.jsonl` from OFFSET on), samples the hardware, folds
the ranks to a summary, and leaves no process behind: when it is told to leave, and by itself when the lead is
not heard of for `Graces.host` seconds. In a session of its own, so that no connection ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import assert_never

import msgspec

from llmtop.presets.errors import ExitCode, LlmtopError, UsageError
from llmtop.presets.inputs import require_tokenizer
from llmtop.profiler.fleet.summariser import Summariser
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.record.events import RankStarted, RunEnded
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.hostabout import HostAbout, write_about
from llmtop.profiler.record.hostevents import OrderCarriedOut, StandbyEnded
from llmtop.profiler.record.hosts import HostDir, Hosts, lead_beat_path, read_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.change.restagefolder import keep_states, remove_states
from llmtop.trainer.change.standby import VARIABLE as STANDBY
from llmtop.trainer.hosts import orders
from llmtop.trainer.hosts.beat import BEAT_SECONDS, HostSign, LeadSign, SignWatch, give_sign, lead_sign
from llmtop.trainer.hosts.devices import chosen_devices, visible_gpus
from llmtop.trainer.hosts.hostscript import HostScript
from llmtop.trainer.hosts.meeting import meeting_variables, own_address
from llmtop.trainer.hosts.starters import passed_variables
from llmtop.trainer.hosts.starterwords import without_user
from llmtop.trainer.hosts.versions import versions_here
from llmtop.trainer.preflight import preflight_here
from llmtop.trainer.script.hookenv import script_environment
from llmtop.trainer.supervisor.extensions import extensions_dir
from llmtop.trainer.supervisor.hardwarewatch import HardwareWatch
from llmtop.trainer.supervisor.journal import Journal
from llmtop.trainer.supervisor.lifeline import run_started, supervisor_failed
from llmtop.trainer.supervisor.logline import log_line
from llmtop.trainer.supervisor.patience import Graces, Patience
from llmtop.trainer.supervisor.rankenv import free_port, rank_environment, worker_command
from llmtop.trainer.supervisor.ranks import RankExit, Ranks, adopt_orphans
from llmtop.trainer.supervisor.scarcity import Scarcity
from llmtop.trainer.supervisor.thinwatch import ThinWatch
from llmtop.trainer.supervisor.wakeup import Wakeup
from llmtop.trainer.toolchain import mended, torch_cuda

_TURN_SECONDS = 0.2
_LOOK_SECONDS = 1.0
"""Between two looks for the lead's sign of life."""
_LEAVE_SECONDS = 30.0


class HostSupervisor:
    def __init__(
        self, run: HostDir, hosts: Hosts, begin: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.run_dir = run
        self.host = run.host
        self.spec = run.spec()
        script = self.spec.script
        self._script = None if script is None else HostScript(run, hosts, script)
        self.environment = {**environment, **chosen_devices(run.host, hosts, environment)}
        self.events = Journal(run.events_path(SUPERVISOR), SUPERVISOR, log=log_line)
        self.ranks = Ranks()
        self.graces = Graces.from_environment(environment)
        self._patience = Patience(self.graces.kill)
        self._orders = orders.OrderTail(run.orders_path, begin)
        self._hardware: HardwareWatch | None = None
        self._summary = SummaryWatch(run)
        self._thinning = ThinWatch(run, log_line)
        self._scarcity = Scarcity(log_line)
        self._standby: dict[int, int] = {}
        self._lead = SignWatch(lead_beat_path(run), _LOOK_SECONDS)
        self._beat_due = 0.0
        self._beats = 0
        self._heard = LeadSign()
        self._answers = hosts.launcher != "ssh"
        """Whether the lead gets a sign for each of its own: it has nothing else to measure clocks by."""
        self._wakeup = Wakeup(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        self._told_to_end = 0
        self._end: RunEnded | None = None
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self) -> RunEnded:
        """From the first event to the last. Whatever happens in between, no rank is left."""
        try:
            self._begin()
            while self._end is None:
                self._turn()
        except BaseException as error:
            self._sweep()
            self.events.write_last(supervisor_failed(self.run_dir, error))
            raise
        left = self._sweep()
        if self._hardware is not None:
            self._hardware.tell_memory_return()
        self._summary.finish()
        self._thinning.finish()
        told = f"; processes {', '.join(map(str, left))} cannot be ended" if left else ""
        end = msgspec.structs.replace(self._end, reason=self._end.reason + told)
        self.events.write_last(end)
        if self._hardware is not None:
            self._hardware.finish()
        return end

    def _begin(self) -> None:
        run = self.run_dir
        run.write_supervisor_pid()
        adopt_orphans()
        self.events.write(run_started(run, self.spec.name, self.spec.world_size))
        # An earlier supervisor may have ended in the middle of a relaunch.
        keep_states(run)
        about = self._about()
        write_about(run, about)
        self._beat()
        if about.problem:
            self._end = RunEnded(state="failed", reason=about.problem, fix=about.fix)
            return
        extensions_dir(self.environment).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._hardware = HardwareWatch(run, self.events.write, log_line, open_seconds=self.graces.driver)
        self._hardware.sample({})
        self._hardware.tell_topology()

    def _about(self) -> HostAbout:
        about = HostAbout(
            node=socket.gethostname(),
            pid=os.getpid(),
            python=sys.executable,
            versions=versions_here(),
            address=own_address(self.host.name.rpartition("@")[2], self.environment),
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=host_memory_bytes(),
            gpus=visible_gpus(),
        )
        if self._script is not None:
            return msgspec.structs.replace(about, problem=self._script.problem(self.environment))
        try:
            nvme_bytes = self.run_dir.prediction().nvme_bytes
            preflight_here(self.spec, nvme_bytes=nvme_bytes, ranks=len(self.host.slots))
            if not self.run_dir.tokenizer_dir.is_dir():
                require_tokenizer(self.spec)
        except LlmtopError as error:
            return msgspec.structs.replace(about, problem=error.in_one_line, fix=error.fix)
        return about

    def _turn(self) -> None:
        for number in self._wakeup.wait(_TURN_SECONDS):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._begin_end(f"received {number.name}")
        for exit_ in self.ranks.reap():
            self._tell_exit(exit_)
        self._tell_standby_ends()
        for order in self._orders.poll():
            self._carry_out(order)
        self.events.flush()
        with self._scarcity.forgiven():
            if self._hardware is not None:
                alive = self.ranks.alive
                self._hardware.sample(alive if self._script is None else self._script.pids(alive))
            self._summary.turn()
            self._thinning.turn()
        quiet = self._lead.quiet_seconds()
        heard = lead_sign(self._lead.content) if self._answers else self._heard
        if time.monotonic() >= self._beat_due or heard != self._heard:
            self._heard = heard
            self._beat()
        if not self._told_to_end and quiet > self.graces.host:
            self._begin_end(f"the launching machine was not heard of for {self.graces.host:g} s")
        self._lose_patience()

    # --- ending without the lead ----------------------------------------------------------------------

    def _begin_end(self, why: str) -> None:
        """The ranks are to save and end: with those of the other hosts, where these are told the same."""
        log_line(why)
        self._told_to_end += 1
        self.ranks.end_standby()
        if not self.ranks.alive:
            self._end = RunEnded(state="failed", reason=why)
            return
        self.ranks.signal(signal.SIGTERM)
        self._patience.wait(0.0 if self._told_to_end > 1 else self.graces.finish, why)

    def _lose_patience(self) -> None:
        if not self._told_to_end:
            return
        if not self.ranks.alive:
            self._end = self._end or RunEnded(state="failed", reason=self._patience.waiting_for)
        elif (action := self._patience.next_action()) == "kill":
            self.ranks.kill()
        elif action == "terminate":
            self.ranks.signal(signal.SIGTERM)

    # --- ranks ----------------------------------------------------------------------------------------

    def _tell_exit(self, exit_: RankExit) -> None:
        self.events.write(exit_.event)

    def _tell_standby_ends(self) -> None:
        for rank, pid in self._standby.items():
            if rank not in self.ranks.standby:
                self.events.write(StandbyEnded(rank=rank, pid=pid))
        self._standby = self.ranks.standby

    def _sweep(self) -> tuple[int, ...]:
        self.ranks.end_standby()
        exits, left = self.ranks.sweep()
        for exit_ in exits:
            self._tell_exit(exit_)
        return left

    def _start_script(self, script: HostScript, order: orders.StartRanks) -> None:
        run = self.run_dir
        usual = {**self.environment, **meeting_variables(order.master_address, self.environment)}
        for process in script.processes(order.master_address, order.master_port):
            number, variables = process.number, {**script_environment(run, usual), **process.variables}
            pid = self.ranks.start(number, process.command, variables, run.log_path(number))
            self.events.write(RankStarted(rank=number, pid=pid, setting=order.setting))

    def _start_ranks(self, order: orders.StartRanks) -> None:
        run, spec = self.run_dir, self.run_dir.spec(order.setting)
        environment = mended(self.environment, None if spec.on_cpu else torch_cuda())
        environment = {**environment, **meeting_variables(order.master_address, environment)}
        if order.standby:
            nvme_bytes = run.prediction(order.setting).nvme_bytes
            preflight_here(spec, nvme_bytes=nvme_bytes, ranks=len(self.host.slots))
            environment[STANDBY] = str(order.setting)
        extensions, command = extensions_dir(self.environment), worker_command(run, environment)
        for rank in self.host.ranks:
            variables = rank_environment(
                run,
                rank,
                port=order.master_port,
                extensions=extensions,
                environment=environment,
                setting=order.setting,
                address=order.master_address,
                first_rank=self.host.first_rank,
                local_ranks=len(self.host.slots),
            )
            pid = self.ranks.start(rank, command, variables, run.log_path(rank), standby=order.standby)
            if not order.standby:
                self.events.write(RankStarted(rank=rank, pid=pid, setting=order.setting))
        self._standby = self.ranks.standby

    # --- orders ---------------------------------------------------------------------------------------

    def _carry_out(self, order: orders.AnyOrder) -> None:
        done = OrderCarriedOut(number=order.number)
        try:
            done = self._do(order) or done
        except (LlmtopError, OSError) as error:
            told = error if isinstance(error, LlmtopError) else LlmtopError(str(error))
            done = OrderCarriedOut(number=order.number, problem=told.in_one_line, fix=told.fix)
        self.events.write(done)

    def _do(self, order: orders.AnyOrder) -> OrderCarriedOut | None:
        match order:
            case orders.OfferPort():
                return OrderCarriedOut(number=order.number, port=free_port())
            case orders.StartRanks():
                if self._script is not None:
                    self._start_script(self._script, order)
                else:
                    self._start_ranks(order)
            case orders.TakeStandby():
                setting = self.run_dir.in_force().setting
                self._tell_standby_ends()
                self._standby = {}
                for rank, pid in self.ranks.take_standby().items():
                    self.events.write(RankStarted(rank=rank, pid=pid, setting=setting))
            case orders.EndStandby():
                self._standby = {}
                self.ranks.end_standby()
            case orders.SignalRanks():
                self.ranks.signal(signal.Signals(order.signal))
            case orders.KillRanks():
                self.ranks.kill()
            case orders.TidyStates():
                keep_states(self.run_dir) if order.keep else remove_states(self.run_dir)
            case orders.Leave():
                self._end = RunEnded(state=order.state, reason=order.reason, fix=order.fix)
            case _:
                assert_never(order)
        return None

    def _beat(self) -> None:
        """Whoever sees this change knows that the host is there, whatever the ranks do."""
        self._beat_due = time.monotonic() + BEAT_SECONDS
        self._beats += 1
        ranks = tuple(sorted(self.ranks.alive))
        sign = HostSign(n=self._beats, t=time.time(), pid=os.getpid(), ranks=ranks, heard=self._heard)
        give_sign(self.run_dir.beat_path, sign)


class SummaryWatch:
    """Nothing that happens while the ranks are folded ends a run."""

    def __init__(self, run: HostDir) -> None:
        self._summariser: Summariser | None = Summariser(run)
        self._fails = False

    def turn(self) -> None:
        self._do(Summariser.turn)

    def finish(self) -> None:
        self._do(Summariser.finish)

    def _do(self, work: Callable[[Summariser], None]) -> None:
        if self._summariser is None:
            return
        try:
            work(self._summariser)
            self._fails = False
        except (OSError, LlmtopError) as error:
            # Most likely a full disk, which may have room again.
            if not self._fails:
                log_line(f"a summary is left out: {error}")
            self._fails = True
        except Exception:  # noqa: BLE001 - training matters more than its pictures; supervisor.log shows it
            log_line(f"ranks are no longer summed up:\n{traceback.format_exc()}")
            self._summariser = None


def _number(hosts: Hosts, name: str, environment: Mapping[str, str]) -> int:
    """Of a host by its name, with or without the user; `slurm`: as Slurm names its nodes."""
    names = [host.name for host in hosts.hosts]
    if name == "slurm":
        name = environment.get("SLURMD_NODENAME", name)
    if name not in names:
        names = [without_user(host) for host in names]
    if name not in names:
        raise UsageError(f"host {name} is none of this run", fix="see hosts.json in the run's folder")
    return names.index(name)


def _write_own_log(run: HostDir) -> None:
    """What is said goes into the host's own log: what has started this may lose its connection."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(run.log_path(SUPERVISOR), flags, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _wait_for_an_earlier_one(run: HostDir, held: ExitStack, busy: UsageError) -> None:
    """Hold the host's folder; raise where another supervisor does not leave it, as its lead has ordered."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while True:
        try:
            held.enter_context(hold(run.own_path, lambda: busy))
            return
        except UsageError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_TURN_SECONDS)


def main(arguments: list[str]) -> int:
    if len(arguments) != 3 or not all(map(str.isdecimal, arguments[2].split(","))):
        raise UsageError("the supervisor of a host takes three arguments: run directory, host, offset")
    path, begins = Path(arguments[0]), [int(text) for text in arguments[2].split(",")]
    hosts = read_hosts(RunDir.open(path))
    if hosts is None:
        raise UsageError(f"{path} is not a run over hosts")
    number = _number(hosts, arguments[1], os.environ)
    run = HostDir(path, hosts.hosts[number])
    run.own_path.mkdir(parents=True, exist_ok=True, mode=0o700)
    busy = UsageError(f"host {run.host.name} already has a supervisor of run {run.run_id}")
    with ExitStack() as held:
        _wait_for_an_earlier_one(run, held, busy)
        if hosts.launcher != "ssh":
            _write_own_log(run)
        variables = {**os.environ, **passed_variables(path)}
        begin = begins[number] if len(begins) > 1 else begins[0]
        end = HostSupervisor(run, hosts, begin, variables).run()
    return ExitCode.DONE if end.state in ("completed", "stopped") else ExitCode.JOB_FAILED


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LlmtopError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
