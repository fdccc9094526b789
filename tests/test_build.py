"""The native library: it uses torch's stable ABI alone, and its absence is always reported."""

import ctypes
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import exhaustive_unless, needs_native

import bapo_kernels
from bapo_kernels import backends, checks
from bapo_kernels.backends import native

ROOT = Path(__file__).parents[1]
LIBRARY = Path(bapo_kernels.__file__).parent / "_C.abi3.so"


@needs_native
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_only_the_stable_abi_of_torch_is_used():
    """C++ symbols of torch change with every release; some export parts of libstdc++, too."""
    command = ["nm", "--dynamic", "--undefined-only", str(LIBRARY)]
    listed = subprocess.check_output(command, text=True).splitlines()
    symbols = [line.split()[-1] for line in listed]
    of_torch = [s for s in symbols if "@" not in s and not s.startswith(("__", "_ITM"))]
    assert len(of_torch) > 10
    allowed = re.compile(r"aoti_torch_|torch_|_Z(N?K?R?|T[ISV])St(?!.*(2at|3c10|5torch))")
    assert [s for s in of_torch if not allowed.match(s)] == []


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="needs g++ and nm")
@pytest.mark.parametrize(
    "source", exhaustive_unless("row_pass".__eq__, ["row_pass", "sampling_sets"])
)
def test_an_instruction_set_has_its_functions_to_itself(tmp_path, monkeypatch, source):
    """Of an inline function that several objects have, the linker takes one copy for all."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    isa = "avx512" if setup["X86"] else "portable"
    unit = next(unit for unit in setup["units"]() if unit.name == f"{source}_{isa}")
    compiled = tmp_path / "unit.o"
    command = ["g++", *setup["compile_flags"](), *unit.flags, "-c", ROOT / unit.source]
    subprocess.run([*command, "-o", compiled], check=True)
    names = subprocess.check_output(["nm", "--defined-only", compiled], text=True)
    assert re.findall(r"^\w+ ([^a-z]) (\S+)", names, re.MULTILINE)  # its tables, at least
    assert re.findall(r"^\w+ ([WVu]) (\S+)", names, re.MULTILINE) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_what_a_change_compiles_again(tmp_path, monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    compile_unless_current = runpy.run_path(str(ROOT / "setup.py"))["compile_unless_current"]
    folder = tmp_path / "with a space"
    folder.mkdir()
    header, source, output = (folder / f"a.{suffix}" for suffix in ("h", "cpp", "o"))
    header.write_text("inline int f() { return 1; }")
    source.write_text('#include "a.h"\nint x = f();')
    command = ["g++", "-c", str(source), "-o", str(output), "-MD", "-MF", str(folder / "a.d")]

    def compiles(*more, made_by="g++ 12"):
        before = output.stat().st_mtime_ns if output.exists() else 0
        compile_unless_current([*command, *more], output, made_by)
        return output.stat().st_mtime_ns > before

    assert [compiles(), compiles(), compiles("-O1"), compiles("-O1")] == [1, 0, 1, 0]
    assert [compiles(made_by="g++ 13"), compiles(), compiles()] == [1, 1, 0]
    header.touch()  # as by a checkout: the content is the same
    assert not compiles()
    times = header.stat().st_atime_ns, header.stat().st_mtime_ns
    header.write_text("int f();")
    os.utime(header, ns=times)  # as by an archive: the content is another
    assert [compiles(), compiles()] == [1, 0]
    header.write_text("no C++")
    for _ in range(2):  # what failed is tried again
        with pytest.raises(subprocess.CalledProcessError):
            compiles()


FIND_STREAM = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # torch and the extension use this libtorch
import torch
torch.ops.load_library(sys.argv[2])
library = ctypes.CDLL(sys.argv[2])  # loaded already: resolves names as its own references
print(library.aoti_torch_get_current_cuda_stream(7, None))
"""


@pytest.mark.slow
@needs_native
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(sys.platform != "linux", reason="linker options of Linux")
def test_the_stream_of_a_torch_for_cuda_is_found(tmp_path):
    """Torch opens its libraries without RTLD_GLOBAL, so the extension must link to libtorch itself,
    which in a torch for CUDA loads the library that has the function."""
    if torch.version.cuda is not None:
        assert ctypes.CDLL(str(LIBRARY)).aoti_torch_get_current_cuda_stream
        return
    stream = 'extern "C" int aoti_torch_get_current_cuda_stream(int i, void**) { return 42 + i; }'
    (tmp_path / "stream.cpp").write_text(stream)
    (tmp_path / "empty.cpp").write_text("")
    shared = ["g++", "-shared", "-fPIC", "-nostartfiles"]
    subprocess.run([*shared, "stream.cpp", "-o", "libtorch_cuda.so"], cwd=tmp_path, check=True)
    needs = ["-Wl,--no-as-needed", "-L.", "-ltorch_cuda", "-Wl,-rpath,$ORIGIN"]
    command = [*shared, "empty.cpp", *needs, "-Wl,-soname,libtorch.so", "-o", "libtorch.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = [sys.executable, "-c", FIND_STREAM, str(tmp_path / "libtorch.so"), str(LIBRARY)]
    assert subprocess.check_output(command, text=True, cwd=LIBRARY.parent.parent) == "49\n"


@needs_native
def test_an_older_torch_is_refused_with_a_reason(monkeypatch):
    def load_library(path):
        raise OSError(f"{path}: undefined symbol: torch_call_dispatcher")

    monkeypatch.setattr(native.torch.ops, "load_library", load_library)
    assert native._load().startswith("the native library does not load")
    monkeypatch.setattr(native.torch, "__version__", "2.9.1+cpu")
    assert native._load().startswith("torch must be 2.10 or later, got 2.9.1+cpu")


@needs_native
@pytest.mark.parametrize(
    ("names", "others", "reason"),
    [
        ("temperature, logit_scale", "logit_scale, temperature", "options[18] must be tem"),
        ("report: loss, ", "report: ", "report[0] must be loss, got pg_loss"),
        (", upper; ", "; ", "fields[7] must be upper, got None"),
        (", upper; ", ", upper, other; ", "fields[8] must be None, got other"),
        (None, None, "layout must be one of its operators, got none"),
    ],
)
def test_a_library_with_other_names_is_refused(monkeypatch, names, others, reason):
    """They cross into the kernels by their place: one number would be taken for another."""
    layout = torch.ops.bapo_kernels.layout()
    assert native._load() is None
    other = NotImplementedError if names is None else [layout.replace(names, others)]
    monkeypatch.setattr(torch.ops.bapo_kernels, "layout", Mock(side_effect=other))
    refused = native._load()
    assert refused.startswith(f"the native library is of other sources: {reason}")
    assert refused.endswith(": build it again")


ALL = "sm_80, sm_90, sm_100, sm_120, compute_120"
OTHERS = "built for {}, the GPU is sm_"
AGAIN = "build again with TORCH_CUDA_ARCH_LIST="
GPU_TENSOR = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("targets", "gpu", "driver", "reason"),
    [
        (ALL, (7, 5), 13, f"{OTHERS}75"),  # no build has kernels for it
        (ALL, (8, 0), 13, None),
        (ALL, (8, 9), 13, None),  # the binary for sm_80
        (ALL, (9, 0), 12, "built with CUDA 13.0, the driver knows CUDA 12"),
        (ALL, (10, 3), 13, None),
        (ALL, (11, 0), 13, f"{OTHERS}110: {AGAIN}11.0"),
        (ALL, (13, 0), 14, None),  # compiled from PTX by the driver
        ("sm_90", (8, 0), 13, f"{OTHERS}80: {AGAIN}8.0"),
        ("sm_90", (10, 0), 13, f"{OTHERS}100: {AGAIN}10.0"),
        ("sm_100, sm_120", (13, 0), 13, f"{OTHERS}130: {AGAIN}13.0"),
        ("sm_80, compute_80", (9, 0), 13, None),
        ("sm_120, compute_100", (9, 0), 13, f"{OTHERS}90: {AGAIN}9.0"),
        ("sm_120, compute_100", (11, 0), 13, None),
        ("compute_120", (12, 0), 13, None),
        ("sm_86", (8, 0), 13, f"{OTHERS}80: {AGAIN}8.0"),  # a binary of a later minor version
    ],
)
@pytest.mark.filterwarnings("ignore:bapo_kernels runs on the PyTorch reference")
def test_reason_where_the_gpu_has_no_kernels(monkeypatch, targets, gpu, driver, reason):
    """``backend=None`` then chooses the next backend instead of failing at the launch."""
    monkeypatch.setattr(native, "why_no_cuda", lambda: None)
    monkeypatch.setattr(native, "build_info", lambda: {"cuda": f"13.0 for {targets}"})
    monkeypatch.setattr(native.torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.setattr(native, "cuda_of_driver", lambda: 1_000 * driver + 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    native._not_built_for.cache_clear()
    expected = reason and reason.format(targets)
    assert bapo_kernels.available_backends()["cuda"] == expected
    taken = backends.choose(None, GPU_TENSOR, "logits")
    assert (taken == "cuda") == (reason is None)
    native._not_built_for.cache_clear()


@pytest.mark.parametrize("version", ["3.4.0", "3.5.1+rocm7", "3.6.0", "3.10.0", None])
def test_an_old_triton_is_not_imported(monkeypatch, tmp_path, version):
    """A file that raises stands for it."""
    if version:
        (tmp_path / "triton.py").write_text(f"__version__ = '{version}'\nraise ImportError")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    for cached in (backends.triton.why_not, backends.triton._why_no_triton):
        monkeypatch.setattr(backends.triton, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(backends.triton, "INTERPRETED", True)  # which asks for no GPU
    old = f"triton must be 3.6 or later, got {version}"
    told = {"3.6.0": None, "3.10.0": None, None: "triton is not installed"}.get(version, old)
    assert bapo_kernels.available_backends()["triton"] == told
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert told is None or not backends.triton._is_interpreted()


@pytest.fixture
def hidden(monkeypatch):
    """No kernels can run, and no warning has been given yet."""
    monkeypatch.setattr(native, "WHY_NO_CPU", "no library")
    monkeypatch.setattr(native, "why_no_cuda", lambda: "no CUDA")
    monkeypatch.setattr(backends.triton, "why_not", lambda: "no Triton")
    checks.warn_once.cache_clear()
    yield
    checks.warn_once.cache_clear()


def row():
    return torch.zeros(1, 5), torch.tensor([2])


@pytest.mark.usefixtures("hidden")
def test_fallback_to_the_reference_warns_once():
    """Where the reference was not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bapo_kernels.log_probs(*row(), backend="reference")
    reason = r"none of them can run on cpu here \(cpu: no library\).*pip install --no-build-isol"
    with pytest.warns(UserWarning, match=reason) as warned:
        _ = [bapo_kernels.log_probs(*row()) for _ in range(2)]
    assert [warning.filename for warning in warned] == [__file__]


def on_a_gpu(monkeypatch, capability, hip):
    """This machine seems to have one."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("why_not_this_gpu", [None, "built for sm_80, the GPU is sm_75"])
@pytest.mark.parametrize(
    ("capability", "hip", "listed"),
    [((10, 3), None, "10.3"), ((7, 5), None, None), ((9, 4), "7", None), (None, None, "all")],
)
def test_fallback_to_the_reference_on_a_gpu_warns_once(
    monkeypatch, why_not_this_gpu, capability, hip, listed
):
    """With a cure for builds on a machine without a GPU, too; a fake tensor has no capability."""
    if capability:
        on_a_gpu(monkeypatch, capability, hip)
    if why_not_this_gpu:
        monkeypatch.setattr(native, "why_no_cuda", lambda: None)
        monkeypatch.setattr(native, "why_no_kernels", lambda device: why_not_this_gpu)
    reasons = rf"\(cuda: {why_not_this_gpu or 'no CUDA'}; triton: no Triton\).* pip install triton"
    cure = rf", or build again .*\(TORCH_CUDA_ARCH_LIST={listed} pip " if listed else ";"
    with pytest.warns(UserWarning, match=reasons + cure) as warned:
        chosen = [backends.choose(None, GPU_TENSOR, "logits") for _ in range(2)]
    assert chosen == ["reference", "reference"]
    assert len(warned) == 1


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize(
    ("capability", "hip", "warns"),
    [((8, 0), None, True), ((7, 5), None, False), ((9, 4), "7", False)],
)
def test_triton_in_the_place_of_cuda_warns_once(monkeypatch, capability, hip, warns):
    """Where a build could have the CUDA backend, and Triton was not asked for."""
    monkeypatch.setattr(backends.triton, "why_not", lambda: None)
    monkeypatch.setattr(backends.triton, "INTERPRETED", False)
    monkeypatch.setattr(backends, "_UNASKED", backends.NAMES)
    on_a_gpu(monkeypatch, capability, hip)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        backends.choose("triton", GPU_TENSOR, "logits")
        assert not warned
        assert [backends.choose(None, GPU_TENSOR, "logits") for _ in range(2)] == ["triton"] * 2
    words = "on its Triton kernels, because those of the CUDA backend cannot run on cuda:0 here "
    words += "(cuda: no CUDA). To have them, build again with nvcc on the path (TORCH_CUDA_ARCH_"
    assert [words in str(warning.message) for warning in warned] == [True] * warns


@needs_native
def test_kernels_that_run_do_not_warn():
    checks.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bapo_kernels.log_probs(*row())
    assert checks.warn_once.cache_info().misses == 0


@pytest.mark.compile
@pytest.mark.usefixtures("hidden")
def test_the_warning_is_not_in_a_compiled_graph():
    torch.compiler.reset()
    compiled = torch.compile(bapo_kernels.log_probs, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="no library") as warned:
        assert all(compiled(*row())[0].isfinite() for _ in range(2))
    torch.compiler.reset()
    assert sum("no library" in str(warning.message) for warning in warned) == 1


NO_GPU = """
import torch
torch.cuda.device_count = torch.cuda.is_available = lambda: 1 / 0
import bapo_kernels
"""


@pytest.mark.slow
def test_import_asks_for_no_gpu():
    """It may initialise the driver, after which a process cannot fork; and a launcher of workers
    chooses their GPU later."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", NO_GPU], env=environment, check=True)


def test_sums_have_the_same_order_everywhere():
    policy = pytest.importorskip("bapo_kernels.backends.triton.token_loss")
    text = (ROOT / "csrc/tokens.h").read_text()
    body = re.search(r"^struct SumsOfTokens {\n(.*?)^};", text, re.DOTALL | re.MULTILINE)[1]
    assert tuple(re.findall(r"(\w+)[,;]", body)) == policy.SUMS
