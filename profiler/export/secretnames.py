"""Which names say that their value is a secret: of environment variables, options and keys of files."""

from __future__ import annotations

import re
from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALWAYS = _words(
    "secret secrets password passwd passphrase credential credentials apikey authorization "
    "accesskey privatekey secretkey authtoken accesstoken"
)
"""Parts of a name that are enough wherever they stand."""
_SOMETIMES = _words("token tokens key keys auth pass pwd cookie cookies dsn pat")
"""Enough in an environment variable; elsewhere such words have other meanings too."""
_KEY_KINDS = _words(
    "api access secret private ssh signing encryption auth account service storage wandb hf huggingface "
    "openai anthropic aws azure gcp google comet neptune license bot client server session refresh id "
    "bearer github gitlab slack hub user login admin db s3 registry deploy webhook"
)
"""What stands before `key` or `token` where it is one that opens something."""
_NOT_SECRET = _words(
    "PWD OLDPWD SSH_AUTH_SOCK KEYBOARD XDG_SESSION_TOKEN_DIR TOKENIZERS_PARALLELISM "
    "HF_TOKEN_PATH WANDB_API_KEY_FILE"
)
"""Names that would be taken for secrets and hold a place or a switch."""
_PLACEHOLDERS = frozenset({"KEY", "KEYS"})
"""As in `KEY=VALUE` of a usage line."""
_AFTER = _words("id value file path str string text base64 b64 json env name")
"""May follow the word that says it: `aws_access_key_id`."""
_PLAIN_VALUES = _words("true false yes no on off none null auto nan inf")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"[-+]?[\d.,_]+(?:[eE][-+]?\d+)?%?")
_RANDOM_LENGTH = 16
SHORTEST = 4
"""Shorter values are nobody's secret."""


def parts_of(name: str) -> list[str]:
    """`hfToken`, `HF_TOKEN` and `hf-token` as the words that they are made of."""
    return [part.lower() for part in _PARTS.findall(name)]


def names_secret(name: str, value: str, *, is_option: bool = False) -> bool:
    """Whether a value of that name is to be kept out of what others see; `is_option`: of a command."""
    if name in _NOT_SECRET or is_plain(value):
        return False
    parts = parts_of(name)
    if _ALWAYS.intersection(parts) or "".join(parts) in _ALWAYS:
        return True
    if name in _PLACEHOLDERS and not is_option:
        return looks_random(value)
    if name.isupper() or (is_option and len(parts) == 1):
        return bool(_SOMETIMES.intersection(parts))
    return _says_by_its_end(parts, value)


def is_plain(value: str) -> bool:
    """A number, a switch or next to nothing."""
    return len(value) < SHORTEST or value.lower() in _PLAIN_VALUES or _NUMBER.fullmatch(value) is not None


def looks_random(value: str) -> bool:
    """Long, and of letters and digits mixed."""
    return (
        len(value) >= _RANDOM_LENGTH
        and any(char.isdigit() for char in value)
        and any(char.isalpha() for char in value)
        and not any(char in "/. <>()" for char in value)
    )


def _says_by_its_end(parts: Sequence[str], value: str) -> bool:
    """`api_key` does; `pad_token`, `missing key` and `token` alone only before what looks random."""
    words = list(parts)
    while len(words) > 1 and words[-1] in _AFTER and words[-2] in _SOMETIMES:
        words.pop()
    if not words or words[-1] not in _SOMETIMES:
        return False
    if len(words) > 1 and words[-2] in _KEY_KINDS:
        return True
    return looks_random(value)
