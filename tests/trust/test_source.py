"""What no line of the program does: seen in the source, so that none can come back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("presets", "profiler", "trainer", "tui")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

RUNS_CODE = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "joblib.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "runpy.run_path", "eval"),
}
"""Readers of files that can run any program, or evaluate text."""
SHELLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"),
    *("asyncio.create_subprocess_shell", "pty.spawn"),
}
STARTERS = {"run", "Popen", "call", "check_call", "check_output"}
UNPACKERS = {"extract", "extractall", "unpack_archive"}
FROM_A_FOLDER = {"from_pretrained", "from_config"}
EXEC = {
    "trainer/hosts/ssh.py": "the program that its own launcher sends over the link",
}
"""Where `exec` stands, and of what."""


def parsed(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def problems(text: str) -> Iterator[str]:
    """What a module does that none may, with its line."""
    for call in parsed(text):
        name = dotted(call.func)
        last = name.rpartition(".")[2]
        passed = [dotted(argument).rpartition(".")[2] for argument in call.args[:1]]
        if name in RUNS_CODE:
            yield f"{call.lineno}: {name} runs what a file says"
        if name in ("torch.load", "numpy.load", "np.load"):
            safe = is_constant(keyword(call, "weights_only"), True) if name == "torch.load" else False
            safe = safe or is_constant(keyword(call, "allow_pickle"), False)
            if not safe:
                yield f"{call.lineno}: {name} may unpickle"
        if name in SHELLS:
            yield f"{call.lineno}: {name} hands a text to a shell"
        if last in STARTERS and not is_constant(keyword(call, "shell") or ast.Constant(False), False):
            yield f"{call.lineno}: {name} with a shell"
        if name.startswith("subprocess.") and last in STARTERS and not _is_list(call):
            yield f"{call.lineno}: {name} of one text"
        if last in UNPACKERS:
            yield f"{call.lineno}: {name} writes where an archive says"
        loads = FROM_A_FOLDER & {last, *passed} and not name.startswith("self.")
        if loads and not is_constant(keyword(call, "trust_remote_code"), False):
            yield f"{call.lineno}: {name} without trust_remote_code=False"


def _is_list(call: ast.Call) -> bool:
    """Words, and no text that somebody would have to quote."""
    first = call.args[0] if call.args else keyword(call, "args")
    return not isinstance(first, ast.JoinedStr | ast.BinOp) and not (
        isinstance(first, ast.Constant) and isinstance(first.value, str)
    )


def test_no_module_unpickles_runs_a_shell_or_code_of_a_model() -> None:
    assert len(SOURCES) > 400
    found = {str(path.relative_to(ROOT)): list(problems(path.read_text())) for path in SOURCES}
    assert {name: told for name, told in found.items() if told} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pickle.load(f)", 1),
        ("torch.load(p)", 1),
        ("torch.load(p, weights_only=False)", 1),
        ("torch.load(p, weights_only=True)", 0),
        ("numpy.load(p)", 1),
        ("numpy.load(p, allow_pickle=False)", 0),
        ("os.system('ls')", 1),
        ("subprocess.run(words, shell=True)", 1),
        ("subprocess.run(words, shell=shell)", 1),
        ("subprocess.run(f'ls {x}')", 1),
        ("subprocess.Popen(['ls', x])", 0),
        ("archive.extractall(x)", 1),
        ("AutoModel.from_pretrained(x)", 1),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", 1),
        ("AutoModel.from_pretrained(x, trust_remote_code=trust)", 1),
        ("partial(AutoModel.from_config, c)", 1),
        ("AutoModel.from_config(x, trust_remote_code=False)", 0),
    ],
)
def test_the_search_finds_what_it_looks_for(text: str, found: int) -> None:
    assert len(list(problems(text))) == found


def test_what_is_executed_as_text_is_known() -> None:
    """`exec` and `compile` stand in one text of the program's own."""
    named = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for call in parsed(path.read_text())
        if dotted(call.func) in ("exec", "compile", "builtins.exec")
    }
    assert named <= set(EXEC)
