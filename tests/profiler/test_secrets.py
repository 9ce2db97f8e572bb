"""Secrets are taken out of names, values and text; what only looks like one stays."""

from __future__ import annotations

import pytest

from llmtop.profiler.export.secrets import REMOVED, Scrubber

HF = "hf_" + "aB3dE5gH7jK9" * 3
HEX = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    "secret",
    [
        HF,
        "sk-proj-abcdef0123456789ABCDEF",
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2c3D4" * 4,
        "glpat-abcDEF0123456789abcd",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abcdefGHIJK",
        "AIza" + "Sy0aB1cD2e" * 4,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    ],
    ids=lambda secret: secret[:6],
)
@pytest.mark.parametrize("around", ["{}", "the worker got {} from the hub", '"{}", 3', "a={}&b=2"])
def test_tokens_are_known_by_their_form(secret: str, around: str) -> None:
    scrubber = Scrubber()
    assert scrubber.text(around.format(secret)) == around.format(REMOVED)
    assert scrubber.count == 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("HF_TOKEN=qwerty12", f"HF_TOKEN={REMOVED}"),
        ("export WANDB_API_KEY='qwerty12'", f"export WANDB_API_KEY='{REMOVED}'"),
        ('{"comet": {"api_key": "qwerty12", "n": 3}}', f'{{"comet": {{"api_key": "{REMOVED}", "n": 3}}}}'),
        ('{"text": "\\"api_key\\": \\"qwerty12\\""}', f'{{"text": "\\"api_key\\": \\"{REMOVED}\\""}}'),
        ("python train.py --hub-token qwerty12 --lr 3", f"python train.py --hub-token {REMOVED} --lr 3"),
        ("detail=deepspeed.comet.api_key=qwerty12", f"detail=deepspeed.comet.api_key={REMOVED}"),
        ("deepspeed.comet.api_key none -> qwerty12", f"deepspeed.comet.api_key none -> {REMOVED}"),
        ("hf_token abcd1234 -> qwerty12: refused", f"hf_token {REMOVED} -> {REMOVED}: refused"),
        ("db_password: qwerty12", f"db_password: {REMOVED}"),
        ("https://joe:qwerty12@host/x?y=1", f"https://{REMOVED}@host/x?y=1"),
        ("git+https://" + "a1" * 10 + "@host/repo", f"git+https://{REMOVED}@host/repo"),
        ("s3 ?X-Amz-Signature=abc123def&x=1", f"s3 ?X-Amz-Signature={REMOVED}&x=1"),
        ("Authorization: Bearer abcdefghijklmnop12", f"Authorization: {REMOVED} {REMOVED}"),
        (f"wandb login {HEX}", f"wandb login {REMOVED}"),
    ],
    ids=lambda text: text[:24],
)
def test_what_a_name_or_a_place_says_is_a_secret(text: str, kept: str) -> None:
    assert Scrubber().text(text) == kept
    again = Scrubber()
    assert again.text(kept) == kept and again.count == 0
    assert Scrubber().text(f"step 1\n{text}\nstep 2") == f"step 1\n{kept}\nstep 2"


@pytest.mark.parametrize(
    "text",
    [
        "step 10 loss 2.31 8192 tokens 12.3K tokens/s",
        "tokens=8192 num_key_value_heads=8 experts_per_token: 2",
        "pad_token = <pad>, eos_token=</s>, tokenizer=/data/tokenizer",
        "KeyError: 'lm_head.weight'",
        "Missing key: model.layers.0.self_attn.k_proj.weight",
        f"commit {HEX}",
        "llmtop set RUN KEY=VALUE ...",
        "the token is not known",
        "TOKENIZERS_PARALLELISM=false",
        "https://host/path@1.2?page=3",
        "the İstanbul key of the map",
    ],
)
def test_what_only_looks_like_one_stays(text: str) -> None:
    scrubber = Scrubber()
    assert scrubber.text(text) == text and scrubber.count == 0


def test_a_private_key_goes_with_all_its_lines() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nAAAA\n-----END RSA PRIVATE KEY-----"
    assert Scrubber().text(f"before\n{key}\nafter") == f"before\n{REMOVED}\nafter"


def test_values_of_the_environment_are_known_wherever_they_stand() -> None:
    scrubber = Scrubber({"MY_SERVICE_TOKEN": "not like any token", "PATH": "/usr/bin", "SHORT_KEY": "abc"})
    assert scrubber.known_values == ("not like any token",)
    assert scrubber.text("it said: not like any token.") == f"it said: {REMOVED}."
    assert scrubber.text("/usr/bin abc") == "/usr/bin abc"


def test_nested_values_and_arguments() -> None:
    scrubber = Scrubber()
    assert scrubber.value({"a": [{"password": "qwerty12"}], "tokens": 8, "pad_token": "<pad>"}) == {
        "a": [{"password": REMOVED}],
        "tokens": 8,
        "pad_token": "<pad>",
    }
    change = {"key": "deepspeed.comet.api_key", "old": "qwerty11", "new": "qwerty12"}
    assert scrubber.value(change) == {**change, "old": REMOVED, "new": REMOVED}
    assert scrubber.value({"key": "zero", "old": 2, "new": "3"}) == {"key": "zero", "old": 2, "new": "3"}
    words = ["python", "x.py", "--token", "qwerty12", "--api-key=qwerty12", "--lr", "3e-4", HEX]
    assert scrubber.words(words) == [
        *("python", "x.py", "--token", REMOVED, f"--api-key={REMOVED}", "--lr", "3e-4", REMOVED)
    ]
    assert scrubber.value({"revision": HEX}) == {"revision": HEX}
    assert scrubber.environment({"KEY": "qwerty12"}) == {"KEY": REMOVED}
    assert scrubber.environment({"A_KEY": "qwerty12", "my_token": "qwerty12", "OMP_NUM_THREADS": "2"}) == {
        "A_KEY": REMOVED,
        "OMP_NUM_THREADS": "2",
        "my_token": REMOVED,
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    [
        *(
            "a",
            "a=",
            "key=",
            "a:",
            "wandb ",
            "wandb",
            "eyJ",
            "-eyJ",
            "eyJaaaaaaaa.",
            "a.",
            "-a",
            "--key ",
            "-a.",
        ),
        *(
            "token ",
            "token  ",
            "bearer 1",
            "http://",
            "://",
            "u:",
            "?sig=",
            "key -> ",
            "a b",
            "\\'",
            '"',
            " ",
        ),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "BEGIN A", "tokens", "hf_", "sk-", "[removed", "9"),
    ],
)
def test_no_text_takes_longer_than_it_is_long(part: str) -> None:
    """With a step for each two of its characters it would take an hour."""
    text = part * (200_000 // len(part))
    Scrubber({"A_TOKEN": "not like any token"}).text(text)
    Scrubber().text(f"wandb key @ :// {text} api_key=")


def test_a_long_chain_of_names_ends_in_a_secret() -> None:
    assert Scrubber().text("a=" * 10_000 + "api_key=qwerty12") == "a=" * 10_000 + f"api_key={REMOVED}"
    assert Scrubber().text("api_key=" + "x1" * 5000 + " after") == f"api_key={REMOVED} after"
