"""One run as one page: a file that needs nothing else, no network and no script."""

from __future__ import annotations

from llmtop.profiler.report import figures, hosts, markup, sections, traces
from llmtop.profiler.report.markup import Markup, element, section
from llmtop.profiler.report.pagedata import PageData

_NAVIGATION = (
    ("out-of-memory", "Out of memory"),
    *(("findings", "Findings"), ("memory", "Memory"), ("timeline", "Timeline"), ("links", "Links")),
    *(("training", "Training"), ("changes", "Changes"), ("hardware", "Ranks and devices")),
    ("looked-at", "Traces"),
    ("fewer-bits", "In fewer bits"),
    *(("configuration", "Configuration"), ("environment", "Environment")),
)


def run_page(data: PageData) -> str:
    """The whole page, as HTML."""
    report = data.report
    no_links = element(
        "p", "No link was measured: there was no GPU, or its driver does not tell.", kind="dim"
    )
    parts = (
        section("Out of memory", sections.out_of_memory(report), anchor="out-of-memory"),
        section("Findings", sections.finding_list(report), anchor="findings"),
        section("Memory", figures.memory_by_moment(data), sections.peak_table(report), anchor="memory"),
        section("Timeline", figures.timeline(data), anchor="timeline"),
        section("Links", figures.links(data) or no_links, anchor="links"),
        section("Training", figures.training(data), anchor="training"),
        section(
            "Changes", sections.change_table(report), sections.setting_table(data.settings), anchor="changes"
        ),
        section(
            "Ranks and devices",
            markup.table(hosts.HEADS, hosts.host_cells(report.hosts), right=range(3, 8)),
            sections.rank_table(data),
            sections.device_table(data),
            sections.host_lines(report),
            anchor="hardware",
        ),
        section("Switches and kernels", sections.switch_table(report), sections.kernel_table(report)),
        section("Traces and snapshots", traces.looked_at(report), anchor="looked-at"),
        section("In fewer bits", sections.quantized_tables(report), anchor="fewer-bits"),
        section("Configuration", sections.configuration(data), anchor="configuration"),
        section("Environment", sections.environment(data), anchor="environment"),
        _foot(data),
    )
    return markup.page(
        f"{report.run_id}: llmtop",
        sections.head(report),
        _navigation(parts),
        sections.cards(report),
        *parts,
    )


def _navigation(parts: tuple[str, ...]) -> Markup:
    there = "".join(parts)
    links = (
        Markup(f'<a href="#{anchor}">{title}</a>')
        for anchor, title in _NAVIGATION
        if f'id="{anchor}"' in there
    )
    return element("nav", *links)


def _foot(data: PageData) -> Markup:
    skipped = data.report.skipped_lines
    note = f" {skipped:,} lines of the record are not understood by this version." if skipped else ""
    version = data.report.versions.get("llmtop") or ""
    return element("p", f"Written by llmtop {version}. Secrets are taken out.{note}", kind="dim")
