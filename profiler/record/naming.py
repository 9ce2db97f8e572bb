"""What a person means by a few letters of an id: one rule for runs and for searches."""

from __future__ import annotations

from collections.abc import Sequence

from llmtop.presets.errors import UsageError, nearest

LATEST = "latest"
_MOST_NAMED = 5


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
