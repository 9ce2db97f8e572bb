"""`llmtop serve-metrics`: the runs of this machine for Prometheus."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.version import install_words
from llmtop.profiler.record import rundir
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.runs import find_run_here
from llmtop.tui.commandline.telling import tell

PORT = 9757


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help=f"{RUN_HELP}; by default every run that goes on"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; by default this machine alone")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="ask for the token in it; where --host lets others ask, by default one that is made",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"by default {PORT}; 0: any that is free, which is told"
    )


def run(args: argparse.Namespace) -> ExitCode:
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "serve-metrics needs prometheus-client",
            why="it is not installed",
            fix=install_words("metrics"),
        )
    if not 0 <= args.port < 1 << 16:
        raise UsageError(f"--port {args.port} is no port", fix="give one from 1 to 65535")
    root = rundir.runs_root()
    only = find_run_here(args.run, "serve-metrics") if args.run else None
    _serve(root, only, args.host, args.port, args.token_file)
    return ExitCode.DONE


def _serve(root: Path, only: RunDir | None, host: str, port: int, token_file: Path | None) -> None:
    """Until somebody interrupts it."""
    # Only those who have it can load it.
    from prometheus_client import make_wsgi_app

    from llmtop.profiler.mirrors.metricsserver import default_token_path, is_loopback, start_server, token_of
    from llmtop.profiler.mirrors.openmetrics import registry

    make = token_file is None and not is_loopback(host)
    if make:
        token_file = default_token_path(root)
    token = None if token_file is None else token_of(token_file, make=make)
    try:
        server = start_server(make_wsgi_app(registry(root, only)), host, port, token)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}",
            why=error.strerror or str(error),
            fix="give another --host or --port",
        ) from error
    if token is not None:
        tell(f"asks for the token in {token_file} (authorization: credentials_file of Prometheus)")
    if not is_loopback(host):
        tell("warning: what is sent can be read on the way: an SSH tunnel to 127.0.0.1 keeps it from others")
    try:
        tell(f"metrics at http://{host}:{server.server_port}/metrics, until Ctrl-C")
        server.serve_forever()
    except KeyboardInterrupt:
        tell("no more metrics")
    finally:
        server.server_close()
