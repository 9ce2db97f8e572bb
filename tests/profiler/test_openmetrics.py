"""What Prometheus is told, read back by its own parsers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
from prometheus_client import generate_latest, parser
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics import parser as openmetrics_parser

from llmtop.presets.errors import UsageError
from llmtop.profiler.mirrors import metricsserver
from llmtop.profiler.mirrors.metricsserver import is_loopback, token_of
from llmtop.profiler.mirrors.openmetrics import RunsCollector, label_names, registry
from llmtop.profiler.record.rundir import RunDir
from tests.fleets import PlayedFleet
from tests.recorded import Recorder, make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec

DASHBOARDS = ("grafana-dashboard.json", "grafana-hosts-dashboard.json")
parse: Any = parser.text_string_to_metric_families
parse_openmetrics: Any = openmetrics_parser.text_string_to_metric_families
generate_openmetrics: Any = openmetrics_exposition.generate_latest
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(families: Any) -> Samples:
    """By name and labels other than the run's id and host."""
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k not in ("run", "host")))): s.value
        for family in families
        for s in family.samples
    }


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_both_formats_are_read_back(tmp_path: Path, kind: Any) -> None:
    run = make_recorded_run(tmp_path, kind=kind, steps=12, end=None)
    made = registry(tmp_path)
    found = samples(parse(generate_latest(made).decode()))
    assert samples(parse_openmetrics(generate_openmetrics(made).decode())) == found
    assert found["llmtop_step", ()] == 12 and found["llmtop_steps_planned", ()] == 12
    assert 1 < found["llmtop_loss", ()] < 10
    assert found["llmtop_phase_seconds", (("phase", "backward"),)] > 0
    assert found["llmtop_rank_step", (("rank", "1"),)] == 12
    peak = found["llmtop_peak_memory_bytes", (("side", "measured"),)]
    parts = [
        v
        for (name, labels), v in found.items()
        if name == "llmtop_memory_bytes" and labels[1][1] == "measured"
    ]
    assert peak > 0 and len(parts) > 5
    info = [dict(labels) for name, labels in found if name == "llmtop_run_info"]
    assert [one["status"] for one in info] == ["running"] and run.run_id in generate_latest(made).decode()
    on_gpu = [name for name, _ in found if name.startswith("llmtop_device")]
    assert bool(on_gpu) == (kind == "cuda")
    if kind == "cuda":
        assert found["llmtop_device_nvlink_sent_bytes_per_second", (("device", "0"),)] == 41e9
        assert found["llmtop_device_energy_joules_total", (("device", "1"),)] > 0


def test_runs_come_grow_and_go(tmp_path: Path) -> None:
    make_recorded_run(tmp_path, steps=3)
    collector = RunsCollector(tmp_path)

    def steps() -> list[float]:
        family = next(one for one in collector.collect() if one.name == "llmtop_step")
        return [sample.value for sample in family.samples]

    assert steps() == [], "a run that has ended is not told"
    spec = recorded_spec("cpu", steps=9)
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    run.write_supervisor_pid()
    recorder = Recorder(run, spec, 1.7e9)
    recorder.start()
    assert steps() == [0]
    recorder.step(1)
    recorder.step(2)
    assert steps() == [2]
    run.prediction_path.rename(tmp_path / "kept")
    assert steps() == [2], "what was read once is not read again"
    recorder.end("completed", 2)
    assert steps() == []
    recorder.close()


def test_of_a_run_that_goes_on_nothing_of_its_processes_before_is_told(tmp_path: Path) -> None:
    spec = recorded_spec("cpu", steps=9)
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    run.write_supervisor_pid()
    recorder = Recorder(run, spec, 1.7e9)
    recorder.start()
    for step in range(1, 7):
        recorder.step(step)
    of_steps = ("loss", "learning_rate", "grad_norm", "step_seconds", "tokens_per_second")

    def told() -> tuple[float | None, set[str]]:
        found = samples(parse(generate_latest(registry(tmp_path)).decode()))
        names = {name.removeprefix("llmtop_") for name, _ in found}
        return found.get(("llmtop_step", ())), {name for name in of_steps if name in names}

    assert told() == (6, set(of_steps))
    recorder.end("stopped", 6)
    recorder.start(goes_on_after=4)
    assert told() == (4, set())
    recorder.step(5)
    assert told() == (5, set(of_steps))
    recorder.close()


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    broken = make_recorded_run(tmp_path, steps=3, end=None)
    make_recorded_run(tmp_path, steps=4, end=None)
    broken.prediction_path.write_text("{")
    found = samples(parse(generate_latest(registry(tmp_path)).decode()))
    assert found["llmtop_step", ()] == 4


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_dashboards_ask_for_what_there_is(name: str) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / name).read_text())
    known = label_names()
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        names = re.findall(r"\bllmtop_\w+", expression)
        assert names and set(names) <= known.keys(), expression
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (metric,) = set(re.findall(r"\bllmtop_\w+", target["expr"]))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            asked = set(re.findall(r'(\w+)=~?"', target["expr"]))
            assert shown | asked <= set(known[metric]), target
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PlayedFleet]:
    played = PlayedFleet(tmp_path)
    played.start()
    played.step(4, slow={3: 2.0})
    yield played
    played.close()


def labelled(collector: RunsCollector) -> dict[tuple[str, ...], float]:
    """Name, host and the other labels' values in their order, without the run's id."""
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "run"}
            found[sample.name, labels.pop("host"), *labels.values()] = sample.value
    return found


def test_of_a_run_over_hosts_each_tells_its_own_ranks_and_the_launching_machine_all_hosts(
    tmp_path: Path, fleet: PlayedFleet
) -> None:
    collector = RunsCollector(tmp_path)
    # All three are this machine here, so this endpoint is that of each of them.
    found = labelled(collector)
    assert {(name[1], name[2]) for name in found if name[0] == "llmtop_rank_step"} == {
        (host.name, str(rank)) for host in fleet.hosts.hosts for rank in host.ranks
    }
    assert found["llmtop_rank_step", "node02", "3"] == 4
    assert ("llmtop_loss", "node02") not in found and ("llmtop_loss", "node01") in found
    assert found["llmtop_fleet_step", "node03"] == 4
    assert found["llmtop_fleet_slowest_rank", "node02"] == 3
    assert found["llmtop_fleet_excess_ratio", "node02"] == pytest.approx(1.0)
    assert found["llmtop_fleet_step_seconds", "node02", "high"] == pytest.approx(1.35)
    assert found["llmtop_fleet_links_down", "node01"] == 0
    fleet.played["node03"].dir.supervisor_pid_path.unlink()
    elsewhere = labelled(RunsCollector(tmp_path))
    assert ("llmtop_rank_step", "node03", "4") not in elsewhere
    assert elsewhere["llmtop_fleet_step", "node03"] == 4
    # Its launching machine's supervisor is gone: a folder without one at all would be a host's part of a run.
    identity = json.loads(fleet.run.supervisor_pid_path.read_bytes())
    fleet.run.supervisor_pid_path.write_text(json.dumps({**identity, "pid": 2**22 + 1}))
    assert not any(name[0].startswith("llmtop_fleet") for name in labelled(RunsCollector(tmp_path)))


def test_the_labels_of_a_host_stay_while_it_is_lost(tmp_path: Path, fleet: PlayedFleet) -> None:
    collector = RunsCollector(tmp_path)
    before = labelled(collector).keys()
    fleet.lose("node02")
    after = labelled(collector)
    assert after.keys() == before
    assert after["llmtop_fleet_host_up", "node02"] == 0


def test_every_sample_says_of_which_run_and_host_it_is(tmp_path: Path, fleet: PlayedFleet) -> None:
    make_recorded_run(tmp_path, steps=3, end=None)
    for family in RunsCollector(tmp_path).collect():
        for sample in family.samples:
            assert set(sample.labels) == set(label_names()[sample.name])
            assert sample.labels["run"] and sample.labels["host"] in ("testhost", *fleet.played)


@contextmanager
def served(folder: Path, *words: str) -> Iterator[tuple[str, str]]:
    """The address of a real server, and what it says before; it ends when it is asked to."""
    server = subprocess.Popen(
        [sys.executable, "-m", "llmtop.tui.cli", "serve-metrics", "--port", "0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LLMTOP_RUNS_DIR": str(folder / "runs")},
    )
    try:
        assert server.stderr is not None
        told = ""
        while (address := re.search(r"http://(.*:\d+)/metrics", told)) is None:
            line = server.stderr.readline()
            assert line, told
            told += line
        yield address[1], told
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()


def answer(address: str, **headers: str) -> tuple[int, str]:
    asked = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=30) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_a_real_server_is_scraped_and_ends_when_asked(tmp_path: Path) -> None:
    make_recorded_run(tmp_path / "runs", steps=5, end=None)
    with served(tmp_path) as (address, told):
        assert address.startswith("127.0.0.1:") and "token" not in told
        status, text = answer(address)
        assert status == 200 and samples(parse(text))["llmtop_step", ()] == 5
        # A page that a browser was made to load from here, under a name of its own.
        assert answer(address, Host="attacker.example:9757")[0] == 403
        assert answer(address, Host="localhost:9757")[0] == 200
    assert not (tmp_path / "metrics-token").exists()


def test_who_only_connects_takes_no_more_than_some_places(monkeypatch: pytest.MonkeyPatch) -> None:
    # So few that none of them waits for a place in the queue of the socket.
    monkeypatch.setattr(metricsserver, "_MOST_AT_ONCE", 3)

    def app(environ: dict[str, object], start: Callable[..., object]) -> list[bytes]:
        start("200 OK", [])
        return [b"there"]

    server = metricsserver.start_server(app, "127.0.0.1", 0, None)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    port, more, threads = int(server.server_address[1]), 2, threading.active_count()
    try:
        with ExitStack() as held:
            idle = [
                held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
                for _ in range(metricsserver._MOST_AT_ONCE + more)
            ]
            # They came in order: those that found no place are the last.
            assert [one.recv(1) for one in idle[-more:]] == [b""] * more
            assert threading.active_count() <= threads + metricsserver._MOST_AT_ONCE
        for _ in range(1000):
            try:
                status, text = answer(f"127.0.0.1:{port}")
                break
            except (ConnectionError, urllib.error.URLError):
                time.sleep(0.05)  # the places are given back as it is noticed that nobody is there
        assert (status, text) == (200, "there")
    finally:
        server.shutdown()
        server.server_close()
        serving.join(30)


def test_others_are_asked_for_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    make_recorded_run(tmp_path / "runs", steps=5, end=None)
    with served(tmp_path, "--host", "0.0.0.0") as (address, told):
        file = tmp_path / "metrics-token"
        assert str(file) in told and "SSH tunnel" in told
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        token = file.read_text().strip()
        assert len(token) >= 43 and token not in told
        here = address.replace("0.0.0.0", "127.0.0.1")
        for wrong in ("", "Bearer", "Bearer ", f"Basic {token}", f"Bearer {token}x", f"bearer {token[:-1]}"):
            status, text = answer(here, Authorization=wrong) if wrong else answer(here)
            assert status == 401 and "llmtop_" not in text
        assert answer(here, Authorization=f"Bearer {token}")[0] == 200
    with served(tmp_path, "--host", "0.0.0.0"):
        assert file.read_text().strip() == token, "Prometheus goes on with it"


def test_a_token_file_is_ones_own_secret(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(UsageError, match="cannot be read"):
        token_of(file, make=False)
    for content, told in (
        (b"short", "at least 16"),
        (b"two words " * 4, "one word"),
        ("ä".encode() * 20, "ASCII"),
    ):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(UsageError, match=told):
            token_of(file, make=False)
    file.write_text("0123456789abcdef\n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="others may read"):
        token_of(file, make=False)
    file.chmod(0o600)
    assert token_of(file, make=False) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True)),
        *(
            ("0.0.0.0", False),
            ("::", False),
            ("", False),
            ("10.0.0.1", False),
            ("localhost.evil.example", False),
        ),
    ],
)
def test_which_addresses_only_this_machine_reaches(host: str, own: bool) -> None:
    assert is_loopback(host) is own
