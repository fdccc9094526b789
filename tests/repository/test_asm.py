"""What the compiler is told of inline PTX. Where it need not move code, no execution tells."""

import re
from pathlib import Path

import pytest

PTX = Path(__file__).parents[2] / "csrc/cuda/ptx.cuh"
STRING = r'"(?:\\.|[^"])*"'
ASM = re.compile(rf"\basm\b((?:{STRING}|[^;])*?);", re.DOTALL)
# Instructions that read, write or order memory.
ORDERED = r"\b(?:ld|st|red|atom|cp|fence|membar|m?barrier|bar|griddepcontrol)\.[\w.:]+"


def statements():
    """Each ``asm`` as its line, what stands before its operands, and the whole of it."""
    source = PTX.read_text().replace("\\\n", "\n ")
    for found in ASM.finditer(source):
        code = re.match(rf"(?:{STRING}|[^\":])*", found[1])[0]
        yield source.count("\n", 0, found.start()) + 1, code, found[1]


@pytest.mark.skipif(not PTX.exists(), reason="not in the repository")
def test_the_compiler_moves_no_memory_access_past_another():
    count = 0
    for line, code, statement in statements():
        text = "".join(re.findall(STRING, code)).replace("\\n", "\n")
        for instruction in re.findall(ORDERED, text):
            count += 1
            where = f"{PTX.name}:{line}: {instruction}"
            assert code.split("(")[0].strip() == "volatile", f"{where} without volatile"
            assert '"memory"' in statement, f'{where} without "memory"'
    assert count >= 12
