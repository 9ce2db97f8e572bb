"""What a person means by a few letters of an id, and which of them are enough: one rule for runs and for
searches."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from llmtop.presets.errors import UsageError, nearest

LATEST = "latest"
_MOST_NAMED = 5
_STAMP = re.compile(r"\d{8}-\d{6}-")
"""Every id that llmtop has given begins with the second of its start, and ends in four letters by chance."""
_MINUTE = 13
"""Characters of it as far as the minute; no later run begins in one that is over."""
_FEWEST, _FEW = 4, 12
"""Characters of a part of an id: fewer soon mean other runs too, and more are no short id."""


def age_order(one: str, written_ns: int) -> tuple[str, int, str]:
    """What ids are sorted by, the oldest first: when they were given, for a name when its folder was written.

    Two of one second differ in a random ending; what was written in them tells which came later.
    """
    stamp = _STAMP.match(one)
    given = time.strftime("%Y%m%d-%H%M%S", time.gmtime(written_ns // 10**9)) if stamp is None else one[:15]
    return given, written_ns, one


def meant(ref: str, ids: Sequence[str], *, thing: str, things: str, empty: UsageError, otherwise: str) -> str:
    """The id that `ref` means: itself, a unique beginning, else a unique end of one, or `latest`.

    `ids` are the newest first. Raises `empty` where there are none; `otherwise` says what to do where no id
    is like it.
    """
    if not ref.strip():
        # Every id begins with nothing: it would mean the only one there is.
        raise UsageError(
            f"no {thing} is named", fix="give an id, a unique beginning or end of one, or latest"
        )
    if not ids:
        raise empty
    if ref == LATEST:
        return ids[0]
    hits = [i for i in ids if i == ref] or [i for i in ids if i.startswith(ref)]
    hits = hits or [i for i in ids if i.endswith(ref)]
    if len(hits) == 1:
        return hits[0]
    if hits:
        shown = ", ".join(hits[:_MOST_NAMED]) + (", ..." if len(hits) > _MOST_NAMED else "")
        raise UsageError(f"'{ref}' means {len(hits)} {things}", why=shown, fix="give more of the id")
    guess = nearest(ref, ids)
    raise UsageError(
        f"there is no {thing} '{ref}'",
        fix=f"did you mean '{guess}'?" if guess else f"{otherwise}; the newest {thing} is {ids[0]}",
    )


def short_ids(ids: Sequence[str], others: Sequence[str] = ()) -> dict[str, str]:
    """For each id the short word that means it among all and `others`, as `meant` has it, and can be read.

    Of ids that llmtop has given it is their four last letters, of names that are not long the name: those
    mostly go on to mean the run when others come. Else it is an end or a beginning, if possible of whole
    words.
    """
    among = _Among((*ids, *others))
    return {i: next((word for word in _words(i) if among.means(word, i)), i) for i in ids}


def cut_words(word: str, run_id: str) -> str:
    """A short id as a part of its run's id: with `…` where the rest was."""
    if word == run_id:
        return word
    return f"…{word}" if run_id.endswith(word) else f"{word}…"


class _Among:
    """All ids, sorted by their beginnings and by their ends."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = frozenset(ids)
        self._ahead = sorted(self._ids)
        self._behind = sorted(one[::-1] for one in self._ids)

    def means(self, word: str, one: str) -> bool:
        """Whether `word` means that one id."""
        if word == LATEST or word in self._ids:
            return word == one != LATEST
        if beginning := _beginning_with(word, self._ahead):
            return beginning == 1 and one.startswith(word)
        return one.endswith(word) and _beginning_with(word[::-1], self._behind) == 1


def _beginning_with(word: str, ordered: Sequence[str]) -> int:
    return bisect_left(ordered, word + chr(0x10FFFF)) - bisect_left(ordered, word)


def _words(one: str) -> Iterator[str]:
    """Ends and beginnings of an id, those first that are shown first."""
    is_stamped = _STAMP.match(one) is not None
    fewest_ahead = _MINUTE if is_stamped else _FEWEST
    if not is_stamped and len(one) <= _FEW:
        yield one
    dashes = [at for at, letter in enumerate(one) if letter == "-"]
    whole = [one[at + 1 :] for at in dashes if len(one) - at > _FEWEST]
    whole += [one[:at] for at in dashes if at >= fewest_ahead]
    yield from sorted((word for word in whole if len(word) <= _FEW and word[0] != "-"), key=len)
    for length in range(_FEWEST, len(one)):
        if one[-length] != "-":  # a command would take it for an option
            yield one[-length:]
        if length >= fewest_ahead:
            yield one[:length]
