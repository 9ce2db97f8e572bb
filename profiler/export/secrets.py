"""Takes secrets out of text, names and values before they leave the machine.

What is recognised: values whose name says it (`secretnames`), tokens by their form (Hugging Face, GitHub,
AWS, OpenAI, Slack, Google, JSON web tokens, bearer headers, private keys, `user:password@` in addresses), and
whatever the environment of the calling process holds under such a name, wherever it turns up.
A secret that has neither name nor form is not found: nothing here is a reason to write secrets into a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmtop.profiler.export.secretnames import names_secret, parts_of

REMOVED = "[removed]"
_KNOWN_LENGTH = 8
"""A shorter value of the environment may be a word that stands anywhere."""

_FORMS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (
        ("private key-----",),
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|(?=\")|\Z)"
        ),
        REMOVED,
    ),
    (("hf_", "api_org_"), re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"), REMOVED),
    (("sk-",), re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), REMOVED),
    (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
        re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"),
        REMOVED,
    ),
    (("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), REMOVED),
    (("xox",), re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"), REMOVED),
    (("aiza",), re.compile(r"\bAIza[\w-]{30,}"), REMOVED),
    (
        ("npm_", "pypi-", "dop_v1_", "lin_api_", "rk_live_", "sk_live_", "wandb_v1_"),
        re.compile(r"\b(?:npm|pypi|dop_v1|lin_api|rk_live|sk_live|wandb_v1)[_-][\w-]{20,}"),
        REMOVED,
    ),
    (
        ("bearer ", "basic ", "token "),
        re.compile(r"(?i)\b(bearer|basic|token)(\s+)(?=[^\s]*\d)[\w.~+/-]{16,}=*"),
        rf"\1\2{REMOVED}",
    ),
    (
        ("@",),
        re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^\s/@:\"'\\]*+:[^\s/@\"'\\]++|[\w.~-]{16,}+)@"),
        rf"\1{REMOVED}@",
    ),
    (
        ("x-amz-", "sig=", "signature="),
        re.compile(
            r"(?i)([?&](?:x-amz-(?:signature|credential|security-token)|sig|signature)=)[^\s&\"'\\\[]+"
        ),
        rf"\1{REMOVED}",
    ),
)
"""What stands in small letters in every text that may hold one, its form, and what takes its place.

Each form is tried a bounded number of times at each character, here and below: a log is as long as whoever
writes it likes, and of any text.
"""
_WEB_TOKEN_RUN = re.compile(r"(?<![\w.-])[\w.-]{20,}+")
_WEB_TOKEN_HEAD = re.compile(r"\beyJ[\w-]{8,}+\Z")
_WEB_TOKEN_BODY = re.compile(r"[\w-]{8,}+")
"""A JSON web token: three parts with dots between, the first of which begins so."""
_WANDB_LINE = re.compile(r"(?i)wandb[^\n]*+")
_WANDB_KEY = re.compile(r"\b(?:local-)?[0-9a-f]{40}\b")
_HEX_KEY = re.compile(r"(?:local-)?[0-9a-f]{40}")
"""A key of Weights & Biases; Git names its commits alike."""
_COMMIT_WORDS = frozenset({"commit", "revision", "sha", "hash", "git", "rev", "version", "snapshot"})
_ASSIGNED = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)\\?[\"']?\s*+[=:]\s*+(?:\\?[\"'])?")
_ASSIGNED_VALUE = re.compile(r"[^\s\"'\\,;&}\])]++")
_OPTION = re.compile(r"(?<![\w.-])(?P<name>--?[A-Za-z_][\w.-]*+)[\"']?,?\s++[\"']?")
_OPTION_VALUE = re.compile(r"[^\s\"'\\,;=-][^\s\"'\\,;]*+")
"""On a command line, or in a list of its words."""
_JUDGED_CHARACTERS = 256
"""Of a value, by which it is told whether it is a secret."""
_CHANGED = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++) (?P<old>\S++) -> (?P<new>[^\s,;:]++)")
"""As a change is told."""
_NAMED = re.compile(
    r"token(?!iz|s\W*[\d(]|s/|s? (?:per|a|of|in|is)\b)|secret|passw|passphrase"
    r"|pwd|pass[\"' =:]|key|credential|auth|cookie|dsn"
)
"""In small letters: a line without one assigns no secret."""
_NAMING_WORDS = ("token", "secret", "pass", "pwd", "key", "credential", "auth", "cookie", "dsn")
"""What each way of it begins with."""


def _named_places(lowered: str) -> list[int]:
    """Where `_NAMED` matches: plain words are found, and it is tried there, in a third of a search for it."""
    places: list[int] = []
    for word in _NAMING_WORDS:
        at = lowered.find(word)
        while at >= 0:
            if _NAMED.match(lowered, at):
                places.append(at)
            at = lowered.find(word, at + len(word))
    return sorted(places)


class Scrubber:
    """Takes secrets out, and counts them."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: whose secrets are known by value, wherever they turn up."""
        found = {value for name, value in (environment or {}).items() if names_secret(name, value)}
        # The longest first: one may be part of another.
        self._known = sorted((v for v in found if len(v) >= _KNOWN_LENGTH), key=len, reverse=True)
        self.count = 0

    @property
    def known_values(self) -> tuple[str, ...]:
        return tuple(self._known)

    def text(self, text: str) -> str:
        """Any text, of one line or many."""
        text = self._without_known(text)
        lowered = text.lower()
        for marks, pattern, replacement in _FORMS:
            if any(mark in lowered for mark in marks):
                text, times = pattern.subn(replacement, text)
                self.count += times
        if "eyj" in lowered:
            text = _WEB_TOKEN_RUN.sub(self._without_web_token, text)
        if "wandb" in lowered:
            text = _WANDB_LINE.sub(self._without_wandb_key, text)
        return self._without_assigned(text)

    def _without_web_token(self, run: re.Match[str]) -> str:
        """A run of letters, digits, dots and the like."""
        parts = run[0].split(".")
        at = 0
        while at < len(parts) - 2:
            head = _WEB_TOKEN_HEAD.search(parts[at])
            if head is not None and _WEB_TOKEN_BODY.fullmatch(parts[at + 1]):
                parts[at : at + 3] = [parts[at][: head.start()] + REMOVED]
                self.count += 1
            at += 1
        return ".".join(parts)

    def _without_wandb_key(self, line: re.Match[str]) -> str:
        kept, times = _WANDB_KEY.subn(REMOVED, line[0])
        self.count += times
        return kept

    def value(self, value: Any, name: str = "") -> Any:
        """A value of a file as it was parsed, with all that is in it; only strings change."""
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            if all(isinstance(part, str) for part in value):
                return type(value)(self.words(value, name))
            return type(value)(self.value(part, name) for part in value)
        return self._string(value, name) if isinstance(value, str) else value

    def _mapping(self, found: Mapping[Any, Any]) -> dict[Any, Any]:
        """A change has the name beside its values: `{"key": "api_key", "old": null, "new": "..."}`."""
        names = {key: str(key) for key in found}
        named = found.get("key")
        if isinstance(named, str):
            last = named.rpartition(".")[2]
            names |= {key: last for key in ("old", "new", "value") if key in found}
        return {self._key(key): self.value(part, names[key]) for key, part in found.items()}

    def words(self, words: Sequence[str], name: str = "") -> list[str]:
        """A list of strings, as the arguments of a command: an option may stand before its value."""
        kept: list[str] = []
        option = ""
        for word in words:
            kept.append(self._string(word, option or name, is_option=bool(option)))
            option = word.lstrip("-") if word.startswith("-") and "=" not in word else ""
        return kept

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables by name; there the name alone decides, as `my_token` has few other meanings."""
        return {
            name: self._string(value, name.upper(), is_option=True)
            for name, value in sorted(environment.items())
        }

    def _key(self, key: Any) -> Any:
        return self.text(key) if isinstance(key, str) else key

    def _string(self, value: str, name: str, *, is_option: bool = False) -> str:
        secret = names_secret(name, value, is_option=is_option) or _is_hex_key(value, name)
        if value != REMOVED and secret:
            self.count += 1
            return REMOVED
        return self.text(value)

    def _without_known(self, text: str) -> str:
        for value in self._known:
            if value in text:
                self.count += text.count(value)
                text = text.replace(value, REMOVED)
        return text

    def _without_assigned(self, text: str) -> str:
        """Only the lines that may assign one are looked at closely: a log has millions of others."""
        kept: list[str] = []
        done = 0
        lowered = text.lower()
        if len(lowered) != len(text):
            return self._close_look(text)  # a character whose small letter is two
        for at in _named_places(lowered):
            if at < done:
                continue
            began = max(done, text.rfind("\n", 0, at) + 1)
            ended = text.find("\n", at)
            ended = len(text) if ended < 0 else ended
            kept += (text[done:began], self._close_look(text[began:ended]))
            done = ended
        return "".join((*kept, text[done:])) if kept else text

    def _close_look(self, text: str) -> str:
        if " -> " in text:
            text = _CHANGED.sub(self._changed, text)
        text = self._without_values(text, _ASSIGNED, _ASSIGNED_VALUE)
        return self._without_values(text, _OPTION, _OPTION_VALUE)

    def _without_values(self, text: str, names: re.Pattern[str], values: re.Pattern[str]) -> str:
        """What looks like one value may hold another name and its value: `detail=api_key=x`."""
        kept: list[str] = []
        done = at = 0
        while (named := names.search(text, at)) is not None:
            at = named.end()
            head = values.match(text, at, at + _JUDGED_CHARACTERS)
            if head is None or not self._is_secret(named["name"], head[0]):
                continue
            whole = values.match(text, at)
            assert whole is not None
            kept += (text[done:at], REMOVED)
            done = at = whole.end()
            self.count += 1
        return "".join((*kept, text[done:])) if kept else text

    def _is_secret(self, name: str, value: str) -> bool:
        if value.startswith(REMOVED[:-1]):
            return False
        bare = name.lstrip("-")
        last = bare.rpartition(".")[2] or bare
        return names_secret(last, value, is_option=name.startswith("-"))

    def _changed(self, found: re.Match[str]) -> str:
        name = found["name"].rpartition(".")[2]
        values = [self._string(value, name) for value in (found["old"], found["new"])]
        return f"{found['name']} {' -> '.join(values)}"


def _is_hex_key(value: str, name: str) -> bool:
    return _HEX_KEY.fullmatch(value) is not None and not _COMMIT_WORDS.intersection(parts_of(name))
