"""`docs/accuracy.md`: the goals, what was measured, who else answers, and what is missing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from benchmarks.accuracy.goals import LIMIT_PERCENTS, Judged, Spread, judged, strata
from benchmarks.accuracy.many import judged_on_many, words_on_many
from benchmarks.accuracy.published import Case, LeftOut, Published
from benchmarks.accuracy.published_doc import cases_words, published_words
from benchmarks.accuracy.rivals import Compared
from benchmarks.accuracy.rows import BLIND_FROM, Coverage
from benchmarks.accuracy.score import LEAST_SHARE, STATES, Score, offloads, words
from benchmarks.accuracy.split import LONGEST_TUNED, TUNED_FAMILIES, Half
from benchmarks.accuracy.steptimes import calibrated_words, swept_words
from benchmarks.accuracy.text import held, table

WORST = 12
UNEXPLAINED_PERCENT = 1.0
"""Of a run's peak: the most that a measured breakdown may leave without a name."""


class Evidence(Struct, frozen=True, kw_only=True):
    """Everything that the document tells of."""

    scores: tuple[Score, ...]
    blind: tuple[Score, ...]
    """Rows with the prediction of before their run."""
    coverage: Coverage
    held_out_sha256: str
    rivals: tuple[Compared, ...]
    published: tuple[Published, ...]
    left_out: tuple[LeftOut, ...]
    cases: tuple[Case, ...]
    pictures: tuple[str, ...]

    def of(self, half: Half) -> list[Score]:
        """The rows of the design of one half."""
        return [score for score in self.scores if score.half == half and not score.earlier]

    @property
    def earlier(self) -> list[Score]:
        return [score for score in self.scores if score.earlier]

    @property
    def of_design(self) -> list[Score]:
        return [score for score in self.scores if not score.earlier]


def document(evidence: Evidence) -> str:
    """The whole text; every figure comes from a file of measured rows and today's prediction of its cell."""
    parts = [
        "# Accuracy of the prediction",
        *_introduction(evidence),
        "## Predicted before the run",
        *_blind(evidence),
        "## Four and eight GPUs",
        *_many(evidence),
        "## The goals, by the formulas of today",
        *_goals(evidence),
        "## G1 by stratum",
        *_strata(evidence),
        "## The rows that are furthest off",
        _worst(evidence.of_design, lambda score: score.peak_percent),
        "## Device memory, host memory, step time",
        *_others(evidence),
        "## Rows that did not complete",
        *_not_completed(evidence),
        "## Others on the same rows",
        *_rivals(evidence),
        *(f"![{name}]({name})" for name in evidence.pictures),
        "## G6: what others have published",
        *published_words(evidence.published, evidence.left_out),
        "## Reports of running out of memory",
        *cases_words(evidence.cases),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(evidence: Evidence) -> Iterator[str]:
    coverage = evidence.coverage
    yield (
        "Made by `python -m benchmarks.accuracy` from the rows in `benchmarks/results/`, each predicted anew "
        "by today's code from its options alone. A percentage is of the measured figure; a size of error has "
        "no sign. Goals that are missed say so."
    )
    yield (
        f"**{coverage.measured} of the {coverage.cells} cells of the design are measured** "
        f"({coverage.held_out_measured} of its {coverage.held_out_cells} held-out cells); "
        f"{len(coverage.not_completed)} rows did not complete (below). {len(evidence.earlier)} rows were "
        "recorded before the design, served to write the formulas, and are told apart as *earlier*."
    )
    tuned = ", ".join(sorted(TUNED_FAMILIES))
    yield (
        f"Held out is a cell on more than one GPU, with more than {LONGEST_TUNED:,} tokens (up to four times "
        f"that), or of a family other than {tuned}; the cell alone decides "
        "(`benchmarks/accuracy/split.py`). The "
        f"list, `benchmarks/held_out.jsonl`, has the SHA-256 `{evidence.held_out_sha256}`. Earlier rows "
        "include two-GPU runs, one of 16,384 tokens and one of gpt_neox, so these were not unknown when the "
        "formulas were written. A rule that a tuned row has mended serves held-out rows as well: most cells "
        "have a neighbour in the other half. So the hardest test is the one before the first table below: "
        "what was predicted of a cell before anybody had measured it."
    )
    for why, count, worst in coverage.set_aside:
        yield f"Completed and not scored ({count}, their peaks off by up to {worst:.1f} %): {why}."


def _blind(evidence: Evidence) -> Iterator[str]:
    yield (
        f"The first {BLIND_FROM} rows were known when the formulas were mended. The {len(evidence.blind)} "
        "rows after them keep the prediction that was made at their launch. These figures change by new "
        "measurements, and where a measurement turns out not to tell (G7 below); mending a formula "
        "afterwards does not touch them."
    )
    yield table(
        ("", "what", "goal", "as predicted at launch", "", "n"),
        (
            (line.goal, line.what, line.asked, line.figure, _met(line), str(line.count))
            for line in judged(evidence.blind)
        ),
    )
    yield _worst(evidence.blind, lambda score: score.peak_percent, 6)


def _many(evidence: Evidence) -> Iterator[str]:
    yield words_on_many(evidence.coverage)
    lines = [
        (gpus, line.goal, line.what, line.asked, line.figure, _met(line), str(line.count))
        for gpus, line in judged_on_many(evidence.blind)
    ]
    if lines:
        yield table(("GPUs", "", "what", "goal", "as predicted at launch", "", "n"), lines)


def _not_completed(evidence: Evidence) -> Iterator[str]:
    rows = (
        (status, words(cell), reason.splitlines()[0][:160])
        for status, cell, reason in evidence.coverage.not_completed
    )
    yield table(("status", "row", "reason"), rows)


def _goals(evidence: Evidence) -> Iterator[str]:
    halves = [judged(evidence.of(half)) for half in (Half.HELD_OUT, Half.TUNED)]
    earlier = judged(evidence.earlier)
    yield table(
        ("", "what", "goal", "held-out", "", "n", "tuned", "", "n", "earlier", "n"),
        (
            (
                held.goal, held.what, held.asked, held.figure, _met(held), str(held.count),
                tuned.figure, _met(tuned), str(tuned.count), old.figure, str(old.count),
            )
            for held, tuned, old in zip(*halves, earlier, strict=True)
        ),
    )  # fmt: skip
    yield (
        "G3 puts a limit at every percent within 15 % of what a run was measured to need (the largest "
        f"allocation and what lies outside the allocator: {len(LIMIT_PERCENTS)} limits a row) and asks "
        "whether it fits. "
        "Fragmentation that the allocator could not give back is not in that need. "
        f"G7 judges a component below {100 * LEAST_SHARE:g} % of the peak against that share, and the peak "
        "against the moment of the same name or the one predicted to have it, whichever is nearer. "
        "G5 after a calibration and G6 stand below."
    )


def _met(line: Judged) -> str:
    return "n/a" if line.met is None else "met" if line.met else "**missed**"


def _strata(evidence: Evidence) -> Iterator[str]:
    halves = [list(strata(evidence.of(half))) for half in (Half.HELD_OUT, Half.TUNED)]
    found = [{(each.axis, each.level): each for each in half} for half in halves]
    keys = list(dict.fromkeys(key for half in found for key in half))
    axes = list(dict.fromkeys(axis for axis, _ in keys))
    rows = []
    for key in sorted(keys, key=lambda key: (axes.index(key[0]), key[1])):
        cells: list[str] = []
        for half in found:
            stratum = half.get(key)
            cells += ["n/a", "", ""] if stratum is None else _of_stratum(stratum.errors)
        met = all(half[key].met for half in found if key in half)
        rows.append((*key, *cells, held(met)))
    yield table(("axis", "level", "held-out mean", "worst", "n", "tuned mean", "worst", "n", ""), rows)


def _of_stratum(errors: Spread) -> list[str]:
    return [f"{errors.mean:.2f} %", f"{errors.worst:.2f} %", str(errors.count)]


def _worst(scores: Sequence[Score], figure: Callable[[Score], float | None], count: int = WORST) -> str:
    known = [(value, score) for score in scores if (value := figure(score)) is not None]
    furthest = sorted(known, key=lambda pair: -abs(pair[0]))[:count]
    rows = ((f"{value:+.2f} %", str(score.half), score.name) for value, score in furthest)
    return table(("error", "half", "row"), rows)


def _others(evidence: Evidence) -> Iterator[str]:
    scores = evidence.of_design
    yield (
        "**G2.** Where runs shared a device, the bytes are those that the driver names for the run's own "
        "processes, and the prediction leaves the driver's own out. The allocator is simulated, tensor "
        "by tensor through two steps, which are held to what torch's memory profiler sees of real modelling "
        "code on the CPU (`tests/profiler/test_tape_real.py`), experts and latent attention too; where the "
        "order is not known (NVMe, SDPA under the mask of a window, and BLOOM, Falcon, gpt-oss and whatever "
        "else has no form in `profiler/memory/tape/`) what it keeps is an estimate."
    )
    yield _worst(scores, lambda score: score.device_percent, 8)
    yield (
        "Of several free blocks of one size the allocator takes the one with the lowest address. The driver "
        "mostly places each segment below the one before, and so does the simulation; but where libraries "
        "are loaded in between it may place one below all others, as recorded runs show. What is held can "
        "hang on it: of two ZeRO-0 runs with 4 x 2,048 tokens whose tensors come and go alike, one held "
        "44,902 MiB and one 49,620, and the simulation gives both, by that one place "
        "(`tests/benchmarks/test_tape_recorded.py`). No option decides it, so the larger one is predicted. "
        "A row that was 10 % off until 2026-11-30, qwen3-0.6b with Liger's fused loss alone, told of a cause "
        "of our own: in the first two steps the probes count what is saved, as aliases; Liger's fused loss "
        "saves the head's gradient, which has then two holders, so that autograd adds a tied embedding's to "
        "it in a third tensor and not in place. With that the simulation holds 17,498 MiB after each step, "
        "the run 17,504; runs that were recorded without probes have two."
    )
    offloading = [score for score in scores if offloads(score.cell)]
    yield (
        f"**G4.** {len(offloading)} rows offload. Pinned pages are counted in each process's resident set; "
        "measured is its high-water mark, library pages that ranks share counted once."
    )
    yield _worst(scores, lambda score: score.host_percent, 8)
    yield (
        "**G5.** Only runs that had their devices for themselves tell a step time; it is the fastest of the "
        "steps after the first."
    )
    yield _worst(scores, lambda score: score.step_percent, 8)
    yield from swept_words()
    yield from calibrated_words()
    yield from _unseen(scores)
    yield _unexplained(scores)
    yield "The components that are furthest off at the peak, in percent of the peak:"
    parts = [
        (value, name, score)
        for score in scores
        for name, value in score.at_peak.items()
        if name not in STATES
    ]
    furthest = sorted(parts, key=lambda part: -abs(part[0]))[:8]
    rows = ((f"{value:+.2f} %", name.replace("_", " "), score.name) for value, name, score in furthest)
    yield table(("error", "component", "row"), rows)


def _unseen(scores: Sequence[Score]) -> Iterator[str]:
    """What G7 cannot be held against, and why."""
    late = [score for score in scores if score.begins_late]
    eight = [score for score in scores if score.cell.get("quantization") == "int8"]
    yield (
        f"**G7.** {len(late)} rows tell of no component at their peak: the trace of it began in the middle "
        "of its step, so that nothing of its forward pass has a name in it (fp16, whose first steps are "
        "skipped: the optimizer's state, and with it the peak, came in the third). A trace begins with its "
        f"step now. Of {len(eight)} rows with 8-bit weights the scales of the weights' rows, up to 0.26 % of "
        "the weights, are predicted and were on the device, but in no component: the probe looked for them "
        "at the weight, from which bitsandbytes takes them in the first forward pass. It looks in both "
        "places now, and their components were measured again: the peaks came out the same to the byte. "
        "What lies outside the allocator is of the first runs (`memory_h200_before.jsonl`), which had "
        "fewer others beside them."
    )


def _unexplained(scores: Sequence[Score]) -> str:
    """How much of what a run held at its peak has no name, which is what every breakdown ends with."""
    told = [(share, score) for score in scores if (share := score.unexplained_percent) is not None]
    over = [score for share, score in told if abs(share) > UNEXPLAINED_PERCENT]
    late = sum(score.begins_late for score in over)
    return (
        f"What a run was measured to hold at its peak, less all that has a name: at most "
        f"{UNEXPLAINED_PERCENT:g} % in {len(told) - len(over)} of {len(told)} rows, the median "
        f"{statistics.median(abs(share) for share, _ in told):.3f} %. The others are {late} of those whose "
        f"trace began late, and {len(over) - late} besides."
    )


def _rivals(evidence: Evidence) -> Iterator[str]:
    yield (
        "All rows of the design, both halves. Each form is asked only for runs that it speaks of, and ours "
        "is told on the same rows. DeepSpeed's and accelerate's figures are by their own words without "
        "activations; people use them to ask whether a run fits."
    )
    yield table(
        (
            "estimate", "counts", "answers", "mean", "p95", "worst", "too low",
            "llmtop on these: mean", "p95", "worst", "too low",
        ),
        (_of_rival(each) for each in evidence.rivals),
    )  # fmt: skip
    lines = [
        f"- {each.rival.name} ({each.rival.source}); no answer: "
        + ("; ".join(f"{reason} ({count})" for reason, count in each.silent) or "none")
        for each in evidence.rivals
    ]
    yield "\n".join(lines)


def _of_rival(each: Compared) -> tuple[str, ...]:
    theirs = _figures(each.errors, each.underestimated)
    ours = _figures(each.ours, each.ours_underestimated)
    answers = f"{each.errors.count if each.errors else 0} of {each.rows}"
    return (each.rival.name, each.rival.counts, answers, *theirs, *ours)


def _figures(errors: Spread | None, below: float) -> tuple[str, ...]:
    if errors is None:
        return ("n/a",) * 4
    return (*(f"{value:.2f} %" for value in (errors.mean, errors.p95, errors.worst)), f"{100 * below:.0f} %")
