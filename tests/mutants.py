"""Changes the policy mathematics at random, and reports which changes the tests notice.

    python tests/mutants.py RESULTS [--seed N] [--count N] [--only PARTS] [--part I/N]

Each mutant changes one operator, number or condition, drawn by the seed, in a copy of the tree.
There, the quick tests of its part run until one fails. Results are JSON lines; an interrupted run
goes on. To compare two versions of the tests, give both the same package and the same seed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import hypothesis  # noqa: F401  (what is slow to import is imported once, for all forks)
import torch
import torch._dynamo
import torch.distributed.fsdp
import triton  # noqa: F401
from forked import first_failure, in_fork

ROOT = Path(__file__).parent.parent
MOST_SECONDS = 1_200  # of the tests of one mutant
CORE = "arguments autograd call head hidden inputs logits prepare rows tokens"
TRITON = "policy_math prepare row_gradient row_math row_pass search sequences token_loss"
# Of each part: its files, and the tests to select.
PARTS = {
    "core": ([f"bapo_kernels/core/{name}.py" for name in CORE.split()], "not triton"),
    "reference": (["bapo_kernels/reference/*.py"], "not triton"),
    "triton": ([f"bapo_kernels/backends/triton/{name}.py" for name in TRITON.split()], "triton"),
    "cpp": ([f"csrc/{name}.h" for name in ("policy_math", "tokens", "prepare")], "not triton"),
}
# The mathematics first; tests of compilers, of processes and of the emulation are left out.
FIRST = [
    "loss",
    "policies",
    "search",
    "prepare",
    "reference",
    "log_probs",
    "linear",
    "sampling_mask",
    "numerics",
]
LEFT_OUT = {
    *("build", "cli", "compile", "cuda_on_host", "fake_gpu", "gpu", "ptx", "ranks"),
    *("sets_on_host", "triton_compile"),
}
SWAPS = [
    (" + ", " - "),
    (" * ", " / "),
    (" += ", " -= "),
    (" *= ", " /= "),
    (" < ", " <= "),
    (" > ", " >= "),
    (" < ", " > "),
    (" <= ", " >= "),
    (" == ", " != "),
    (" and ", " or "),
    (" && ", " || "),
    (" & ", " | "),
    (" is None", " is not None"),
    ("True", "False"),
    ("true", "false"),
    ("minimum", "maximum"),
    ("fmin", "fmax"),
    ("min(", "max("),
    ("exp(", "expm1("),
]
NUMBER = re.compile(r"(?<![\w.\"])\d+(?:\.\d+)?(?:e-?\d+)?f?(?![\w.])")
NEGATION = re.compile(r"\bnot |(?<=[(=,\s])(?:!|-)(?=[A-Za-z_(])")
NO_CODE = re.compile(
    r"\s*(#|//|from |import |@|raise |static_assert|assert )|.*(Error\(|TORCH_CHECK)"
)


class Mutant(NamedTuple):
    part: str
    file: str
    at: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        assert text[self.at :].startswith(self.old)
        return text[: self.at] + self.new + text[self.at + len(self.old) :]


def code_of(file: Path) -> str:
    """The text, blank where it is a string or a comment."""
    text = file.read_text()
    if file.suffix == ".py":
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        strings = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None))
        spans = [
            [starts[row - 1] + column for row, column in (token.start, token.end)]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in strings
        ]
    else:
        comments = r"//.*|/\*[\s\S]*?\*/|\"(?:\\.|[^\"\\])*\"|^#.*"
        spans = [match.span() for match in re.finditer(comments, text, re.MULTILINE)]
    for begin, end in spans:
        text = text[:begin] + re.sub(r"\S", " ", text[begin:end]) + text[end:]
    return "".join(
        re.sub(r"\S", " ", line) if NO_CODE.match(line) else line
        for line in text.splitlines(keepends=True)
    )


def mutants_of(part: str) -> list[Mutant]:
    found = []
    for file in sorted(file for pattern in PARTS[part][0] for file in ROOT.glob(pattern)):
        code, name = code_of(file), str(file.relative_to(ROOT))
        for a, b in [*SWAPS, *(pair[::-1] for pair in SWAPS)]:
            places = re.finditer(re.escape(a) + "(?!None)", code)  # not in Tensor | None
            found += [Mutant(part, name, at.start(), a, b) for at in places]
        for at in NUMBER.finditer(code):
            more = re.sub(r"^\d+", lambda digits: str(int(digits[0]) + 1), at[0])
            found.append(Mutant(part, name, at.start(), at[0], more))
        found += [Mutant(part, name, at.start(), at[0], "") for at in NEGATION.finditer(code)]
    return found


def drawn(seed: int, count: int, parts: list[str]) -> list[Mutant]:
    """Equally many of each part, whichever parts are asked for."""
    return [
        mutant
        for part in parts
        for mutant in random.Random(f"{seed} {part}").sample(mutants_of(part), count // len(PARTS))
    ]


def verdict(tree: Path, part: str) -> tuple[str, float]:
    """The first test that fails, and why, or "survived"; and the seconds of CPU time."""

    def failure() -> str:
        sys.path[:0] = [str(tree), str(tree / "tests")]
        os.chdir(tree)
        files = {file.stem.removeprefix("test_"): file for file in Path("tests").glob("test_*.py")}
        selected = ["-m", "not slow and not compile", "-k", PARTS[part][1]]
        selected += ["--hypothesis-profile", "quick"]
        found = ""
        for group in (FIRST, sorted(files.keys() - LEFT_OUT.union(FIRST))):  # collecting is slow
            there = [str(files[name]) for name in group if name in files]
            found = found or first_failure(*selected, *there)
        return found

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    return in_fork(failure, MOST_SECONDS) or "survived", spent() - before


def builds(tree: Path) -> bool:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    flags = {"CXXFLAGS": "-O1", "BAPO_REQUIRE_NATIVE": "1"}
    return not subprocess.run(
        command, cwd=tree, env=os.environ | flags, capture_output=True, check=False
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--part", default="1/1", help="which of N processes this one is")
    options = parser.parse_args()
    index, of = map(int, options.part.split("/"))
    done = set()
    if options.results.exists():
        lines = map(json.loads, options.results.read_text().splitlines())
        done = {Mutant(**{key: line[key] for key in Mutant._fields}) for line in lines}
    torch.set_num_threads(1)  # threads do not outlive a fork
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        skip = shutil.ignore_patterns(".git", ".venv", "build", "out", "__pycache__", "wheels")
        shutil.copytree(ROOT, tree, ignore=skip, symlinks=True)
        compile_all = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
        writing = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run(compile_all, cwd=tree, env=os.environ | writing, stdout=subprocess.DEVNULL)
        sys.dont_write_bytecode = True  # a mutant's could pass for the original's
        for mutant in drawn(options.seed, options.count, options.only.split(","))[index - 1 :: of]:
            if mutant in done:
                continue
            file = tree / mutant.file
            text = file.read_text()
            file.write_text(mutant.applied(text))
            if mutant.part == "cpp" and not builds(tree):
                result, seconds = "does not compile", 0.0
            else:
                result, seconds = verdict(tree, mutant.part)
            file.write_text(text)
            line = mutant._asdict() | {"line": text[: mutant.at].count("\n") + 1}
            line |= {"result": result, "seconds": round(seconds, 1)}
            with options.results.open("a") as results:
                results.write(json.dumps(line) + "\n")
            print(f"{mutant.file}:{line['line']} {mutant.old!r} -> {mutant.new!r}: {result}")


if __name__ == "__main__":
    main()
