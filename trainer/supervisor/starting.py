"""Starts the ranks of a run that has one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmtop.profiler.record.events import RankStarted
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.standby import VARIABLE as STANDBY
from llmtop.trainer.supervisor.extensions import extensions_dir
from llmtop.trainer.supervisor.rankenv import free_port, rank_environment, worker_command
from llmtop.trainer.supervisor.ranks import Ranks
from llmtop.trainer.toolchain import mended, torch_cuda


def start_ranks(
    run: RunDir,
    ranks: Ranks,
    environment: Mapping[str, str],
    write: Callable[[RankStarted], object],
    setting: int,
    *,
    standby: bool = False,
) -> None:
    """All of one setting. The record is told of each; of those that stand by once they are let go.

    Raises LlmtopError where one cannot be started.
    """
    spec = run.spec(setting)
    port, command, extensions = free_port(), worker_command(run, environment), extensions_dir(environment)
    usual = mended(environment, None if spec.on_cpu else torch_cuda())
    if standby:
        usual = {**usual, STANDBY: str(setting)}
    for rank in range(spec.world_size):
        variables = rank_environment(
            run,
            rank,
            port=port,
            extensions=extensions,
            environment=usual,
            setting=setting,
        )
        pid = ranks.start(rank, command, variables, run.log_path(rank), standby=standby)
        if not standby:
            write(RankStarted(rank=rank, pid=pid, setting=setting))
