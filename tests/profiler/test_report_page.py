"""A run's page: everything is in it, it asks for nothing, and nothing that somebody wrote becomes markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.spec import Provenance, ValueSource
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.memory.result import Component
from llmtop.profiler.oom.words import fix_words
from llmtop.profiler.record.changeevents import ChangeRefused
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import KernelsSeen, KernelTime, RankFailed
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.profiler.report.envelope import MOST_BUCKETS, Envelope, EnvelopeBuilder
from llmtop.profiler.report.history import DEVICE_FIGURES, EACH_DEVICE
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import PageData, read_page
from llmtop.profiler.report.svg import nice_ticks
from tests.recorded import make_recorded_run
from tests.recorded_changes import make_changed_run
from tests.recorded_spec import recorded_prediction, recorded_spec

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'></svg></style></title>&amp;\u202e"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Parsed(HTMLParser):
    """Elements with their attributes, the text, and whether every element that was opened is closed."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


def page_of_run(run: RunDir) -> tuple[PageData, str]:
    data = read_page(run, Scrubber())
    return data, run_page(data)


def require_harmless(page: str) -> Parsed:
    """No element that acts, no attribute that acts, nothing from elsewhere."""
    parsed = Parsed(page)
    assert not parsed.open
    assert not parsed.names & {
        "script",
        "img",
        "iframe",
        "link",
        "object",
        "embed",
        "form",
        "base",
        "image",
        "use",
    }
    for _, attributes in parsed.elements:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "srcset", "xlink:href", "style")
            assert name != "href" or str(value).startswith("#")
    policy = [a["content"] for n, a in parsed.elements if n == "meta" and a.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style
    return parsed


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_page_has_every_part(tmp_path: Path, kind: Any) -> None:
    kernels = KernelsSeen(step=3, total_seconds=1.0, top=(KernelTime(name="gemm", seconds=0.5, calls=3),))
    data, page = page_of_run(make_recorded_run(tmp_path, kind=kind, steps=40, kernels=kernels))
    parsed = require_harmless(page)
    ids = [attributes["id"] for _, attributes in parsed.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    links = [str(attributes["href"])[1:] for name, attributes in parsed.elements if name == "a"]
    assert set(links) <= set(ids) and {"memory", "timeline", "links", "training", "configuration"} <= set(
        links
    )
    plots = {str(a["aria-label"]) for name, a in parsed.elements if name == "svg"}
    assert {"Memory by moment", "Phases of a step", "Loss", "Learning rate", "Step time"} <= plots
    on_gpu = {"Device memory (NVML)", "NVLink, sent", "PCIe, received", "GPU utilization"}
    assert on_gpu <= plots if kind == "cuda" else not on_gpu & plots
    for words in (
        data.report.run_id,
        "end of forward, predicted",
        "measured",
        "sum = peak",
        "gemm",
        "seq_len",
    ):
        assert words in parsed.text
    assert parsed.text.count("exit 0") == 2
    assert ("No link was measured" in parsed.text) == (kind == "cpu")


def test_a_changed_run_has_all_its_settings_and_marks(tmp_path: Path) -> None:
    _, page = page_of_run(make_changed_run(tmp_path))
    parsed = require_harmless(page)
    for words in ("micro_batch=8", "gradient_checkpointing=true", "1 to 12", "13 to 24", "25 to 36"):
        assert words in parsed.text
    marks = [a for name, a in parsed.elements if name == "line" and a.get("class") == "mark"]
    assert len(marks) >= 2 * 4, "two changes in each plot over time or steps"


def test_what_somebody_wrote_stays_text(tmp_path: Path) -> None:
    spec = recorded_spec("cpu", data=EVIL, tokenizer=EVIL)
    spec = replace(
        spec,
        name=EVIL,
        model=replace(spec.model, name=EVIL),
        gpu=replace(spec.gpu, name=EVIL),
        provenance={"data": Provenance(source=ValueSource.COMMAND_LINE, detail=EVIL)},
    )
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {EVIL: EVIL})
    with EventWriter(run.events_path(0), "rank0") as writer:
        writer.write(
            KernelsSeen(step=1, total_seconds=1.0, top=(KernelTime(name=EVIL, seconds=0.5, calls=3),))
        )
        writer.write(RankFailed(error_type=EVIL, message=EVIL, where=EVIL, traceback=EVIL))
    with EventWriter(run.events_path("supervisor"), "supervisor") as writer:
        writer.write(ChangeRefused(asked=(EVIL,), reason=EVIL, fix=EVIL))
    _, page = page_of_run(run)
    parsed = require_harmless(page)
    # Shown as it was written, in each of the places; only what turns the text's direction is gone.
    assert parsed.text.count("<script>alert(1)</script>") >= 8
    assert "\u202e" not in page


def test_a_run_out_of_memory_tells_when_and_what_fits(tmp_path: Path) -> None:
    data, page = page_of_run(make_recorded_run(tmp_path, kind="cuda", steps=4, end="out_of_memory"))
    parsed = require_harmless(page)
    assert data.report.out_of_memory is not None and "Out of memory" in parsed.text
    assert "rank 0 in backward of step 5" in parsed.text
    assert all(fix_words(fix) in parsed.text for fix in data.report.out_of_memory.fixes)


def test_what_a_script_does_between_its_steps_has_a_column_where_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, usual = page_of_run(make_recorded_run(tmp_path / "usual", steps=6))
    assert BETWEEN not in _first_rank(usual)
    shares = {"data": 0.1, BETWEEN: 0.3, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    monkeypatch.setattr("tests.recorded._PHASE_SHARE", shares)
    _, page = page_of_run(make_recorded_run(tmp_path / "script", steps=6))
    told = _first_rank(page)
    assert list(told)[-6:] == [*shares, "end"]
    assert told[BETWEEN] == told["backward"] != told["data"]


def _first_rank(page: str) -> dict[str, str]:
    """Of the table of ranks."""
    table = next(part for part in page.split("<table") if ">pid<" in part)
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", table)[: len(heads)]
    return dict(zip(heads, cells, strict=True))


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    spec = recorded_spec("cuda")
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    parsed = require_harmless(page_of_run(run)[1])
    assert "Loss" not in {str(a.get("aria-label")) for _, a in parsed.elements}
    assert "end of forward, predicted" in parsed.text


def test_the_largest_page_is_below_its_limit(tmp_path: Path) -> None:
    data, _ = page_of_run(make_recorded_run(tmp_path, kind="cuda", steps=4))
    builder = EnvelopeBuilder()
    for at in range(2 * MOST_BUCKETS - 1):
        builder.add(at * 1.2345678, 1e11 + at * 123456.789)
    full = builder.freeze()
    history = replace(
        data.history,
        steps=dict.fromkeys(data.history.steps, full),
        phases=dict.fromkeys(data.history.phases, full),
        devices={figure: dict.fromkeys(range(EACH_DEVICE), full) for figure in DEVICE_FIGURES},
        processes=dict.fromkeys(range(EACH_DEVICE), full),
    )
    page = run_page(replace(data, history=history))
    require_harmless(page)
    assert len(page.encode()) < 5_000_000


@given(st.lists(st.floats(-1e6, 1e6) | st.none() | st.just(float("nan")), max_size=5000))
def test_an_envelope_keeps_the_extremes_and_the_mean(values: list[float | None]) -> None:
    builder = EnvelopeBuilder()
    for at, value in enumerate(values):
        builder.add(float(at), value)
    found = builder.freeze()
    known = [value for value in values if value is not None and value == value]
    assert found.points == len(known) and len(found.x) < 2 * MOST_BUCKETS
    if not known:
        assert found == Envelope()
        return
    assert min(found.low) == min(known) and max(found.high) == max(known)
    assert list(found.x) == sorted(found.x)
    assert all(low <= mean + 1e-6 and mean <= high + 1e-6 for _, low, high, mean in found.rows())


def test_a_long_series_is_thinned_evenly() -> None:
    builder = EnvelopeBuilder()
    for at in range(100_000):
        builder.add(float(at), 1e9 if at == 54_321 else float(at % 7))
    found = builder.freeze()
    assert MOST_BUCKETS <= len(found.x) < 2 * MOST_BUCKETS and found.is_thinned
    spikes = [(x, high) for x, _, high, _ in found.rows() if high == 1e9]
    assert len(spikes) == 1 and abs(spikes[0][0] - 54_321) < 100_000 / MOST_BUCKETS


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 7 and ticks == sorted(ticks)
    room = 1e-6 * max(abs(low), abs(high), span)
    assert all(low - room <= tick <= high + room for tick in ticks)


def test_a_component_of_a_newer_version_is_drawn_too(tmp_path: Path) -> None:
    data, _ = page_of_run(make_recorded_run(tmp_path, steps=4))
    strange = replace(data.measured[0], components={"ghosts": 3 << 20, str(Component.LOGITS): 1 << 20})
    assert "ghosts: 3.00 MiB" in Parsed(run_page(replace(data, measured=(strange,)))).text


def browse(page: Path, *options: str) -> str:
    """Open a page in a browser of its own; what it wrote to the console and of itself."""
    browser = next(name for name in BROWSERS if shutil.which(name))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    words = [browser, *flags, profile, *options, page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def asked_by_the_page(net_log: Path) -> set[str]:
    """Addresses that the page asked for; what the browser asks for of its own accord has no origin."""
    found = [event.get("params", {}) for event in json.loads(net_log.read_text())["events"]]
    return {
        str(p["url"]) for p in found if "url" in p and p.get("initiator", "") not in ("", "not an origin")
    }


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium is installed")
def test_a_real_browser_shows_it_and_asks_for_nothing(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "runs", kind="cuda", steps=40)
    page, picture, net_log = tmp_path / "report.html", tmp_path / "page.png", tmp_path / "net.json"
    page.write_text('<img src="http://127.0.0.1:9/x.png">')
    browse(page, f"--screenshot={picture}", f"--log-net-log={net_log}")
    assert asked_by_the_page(net_log) == {"http://127.0.0.1:9/x.png"}, "or the next line could not fail"
    page.write_text(page_of_run(run)[1])
    told = browse(page, "--window-size=900,4000", f"--screenshot={picture}", f"--log-net-log={net_log}")
    assert not asked_by_the_page(net_log)
    assert "CONSOLE" not in told, "a page without faults writes nothing to the console"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 50_000
    printed = tmp_path / "page.pdf"
    browse(page, f"--print-to-pdf={printed}")
    assert printed.read_bytes().startswith(b"%PDF")
