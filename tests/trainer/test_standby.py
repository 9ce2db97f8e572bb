"""What a rank that stands by beside others may load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmtop.trainer.change.standby import touches_cuda


@pytest.mark.parametrize(
    ("module", "touches"),
    [
        ("bitsandbytes", True),
        ("liger_kernel.transformers", True),
        ("transformers.trainer", True),
        ("transformers.models.llama.modeling_llama", False),
        ("accelerate", False),
        ("peft_like", False),
    ],
)
def test_which_modules_take_device_memory(module: str, touches: bool) -> None:
    assert touches_cuda(module) is touches


def last_two(program: str) -> list[str]:
    """Words that it prints, in an interpreter that has loaded nothing else."""
    begin = (
        "import sys\n"
        "from tests.worker.launching import tiny_spec\n"
        "from llmtop.trainer.worker.session import import_libraries\n"
    )
    call = [sys.executable, "-c", begin + program]
    found = subprocess.run(call, capture_output=True, text=True, check=True)
    sys.stderr.write(found.stderr[-800:])
    return found.stdout.split()[-2:]


@pytest.mark.slow
def test_a_rank_off_the_device_leaves_them_out() -> None:
    program = (
        "spec = tiny_spec(lora_rank=4)\n"
        "import_libraries(spec, off_device=True)\n"
        "early = 'peft' in sys.modules\n"
        "import_libraries(spec)\n"
        "print(early, 'peft' in sys.modules)\n"
    )
    assert last_two(program) == ["False", "True"]


@pytest.mark.slow
def test_torchao_is_loaded_by_who_rounds_alone() -> None:
    pytest.importorskip("torchao")
    program = (
        "def torchao():\n"
        "    import transformers.quantizers.auto, peft\n"
        "    return sum(name.startswith('torchao.') for name in sys.modules) > 0\n"
        "import_libraries(tiny_spec(lora_rank=4), off_device=True)\n"
        "standing_by = torchao()\n"
        "import_libraries(tiny_spec(lora_rank=4))\n"
        "training = torchao()\n"
        "import_libraries(tiny_spec(qat='int4-weight-only'))\n"
        "import torchao.quantization.qat\n"
        "print(standing_by, training)\n"
    )
    assert last_two(program) == ["False", "False"]
