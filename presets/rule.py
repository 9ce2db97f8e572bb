"""What a rule is: a combination that cannot work, why, and the nearest setting that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from llmtop.presets.spec import RunSpec


class Refusal(Struct, frozen=True, kw_only=True):
    """One combination of a run that cannot work."""

    rule: str
    """Name of the row that refused."""
    what: str
    why: str
    fix: str


def _no_words(_: RunSpec) -> Mapping[str, str | float]:
    return {}


class Rule(Struct, frozen=True, kw_only=True):
    """One row of a table of rules; the texts may name `{o.option}`, `{gpu.x}`, `{model.x}` and `{spec.x}`."""

    name: str
    refuses: Callable[[RunSpec], bool]
    what: str
    why: str
    fix: str
    source: str
    """Where it was read or seen that the combination cannot work."""
    words: Callable[[RunSpec], Mapping[str, str | float]] = _no_words
    """Further `{words}` of the texts."""

    def refusal(self, spec: RunSpec) -> Refusal:
        """The rule's texts filled in for one run."""

        def fill(text: str) -> str:
            return text.format(o=spec.options, gpu=spec.gpu, model=spec.model, spec=spec, **words)

        words = self.words(spec)
        return Refusal(rule=self.name, what=fill(self.what), why=fill(self.why), fix=fill(self.fix))
