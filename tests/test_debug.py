"""check_inputs names the first offending index; the report names reasons."""

import subprocess
import sys

import pytest
import torch
from helpers import make_case

import bapo_kernels
from bapo_kernels.debug import check_inputs, environment


def case():
    return make_case((3, 4), V=9, masked=0.0, idle=0.0, poison=False)


def test_good_inputs_pass():
    good = case()
    good.logits[0, 0, 3] = -torch.inf
    good.response_mask[1, 1] = False
    good.logits[1, 1] = torch.nan
    good.labels[1, 1] = 77
    check_inputs(good.logits, *good.arguments(), statistics="live", **good.options)


def test_bad_labels():
    bad = case()
    bad.labels[:] = 1
    bad.labels[2, 1] = 9
    with pytest.raises(ValueError, match=r"labels must be in \[0, 9\) or -100, got 9 at \(2, 1\)"):
        check_inputs(bad.logits, *bad.arguments())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_logits(value):
    bad = case()
    bad.labels[:] = 1
    bad.logits[1, 3, 7] = value
    with pytest.raises(ValueError, match=r"logits must be finite or -inf, got .* at \(1, 3, 7\)"):
        check_inputs(bad.logits, *bad.arguments())


def test_row_without_a_token():
    bad = case()
    bad.labels[:] = 1
    bad.logits[1, 3] = -torch.inf
    with pytest.raises(ValueError, match=r"logits must allow a token in every row.* at \(1, 3\)"):
        check_inputs(bad.logits, *bad.arguments())


@pytest.mark.parametrize(
    "name", ["old_log_probs", "rollout_log_probs", "rollout_is_weights", "ref_log_probs"]
)
def test_bad_tokens(name):
    bad = case()
    bad.labels[:] = 1
    values = torch.zeros(3, 4)
    values[2, 3] = -torch.inf
    options = {}
    if name == "old_log_probs":
        bad.old_log_probs = values
    else:
        options[name] = values
    with pytest.raises(ValueError, match=rf"{name} must be finite, got -inf at \(2, 3\)"):
        check_inputs(bad.logits, *bad.arguments(), **options)


def test_bad_advantages():
    bad = case()
    bad.labels[:] = 1
    bad.advantages[0, 2] = torch.nan
    with pytest.raises(ValueError, match=r"advantages must be finite, got nan at \(0, 2\)"):
        check_inputs(bad.logits, *bad.arguments())


def test_bad_offsets():
    x = torch.zeros(4)
    for offsets in ([0, 5], [1, 4], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 4"):
            check_inputs(torch.zeros(4, 3), x.long(), x, x, cu_seqlens=torch.tensor(offsets))


def test_report():
    report = environment()
    assert report["bapo_kernels"] == bapo_kernels.__version__
    for name, reason in bapo_kernels.available_backends().items():
        expected = "available" if reason is None else f"absent: {reason}"
        assert report[f"backend {name}"] == expected


def test_command_line():
    run = subprocess.run(
        [sys.executable, "-m", "bapo_kernels"], capture_output=True, text=True, check=True
    )
    assert "backend reference available" in run.stdout


def test_missing_library_is_explained(tmp_path, monkeypatch):
    """Without the native library everything still runs, and the reason is told."""
    from bapo_kernels.backends import native

    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    assert "setup.py has not built it" in native._load()
    (tmp_path / "_build.json").write_text('{"native": "no C++ compiler found"}')
    reason = native._load()
    assert reason == "the native library is absent: no C++ compiler found"
    monkeypatch.setattr(native, "WHY_NO_CPU", reason)
    assert bapo_kernels.available_backends()["cpu"] == reason
    c = case()
    assert bapo_kernels.bapo_loss(c.logits, *c.arguments()).loss.isfinite()
    assert bapo_kernels.find_clip_bounds(c.old_log_probs, None, c.advantages).upper > 1
    with pytest.raises(ValueError, match="backend 'cpu' cannot run: .*no C\\+\\+ compiler found"):
        bapo_kernels.bapo_loss(c.logits, *c.arguments(), backend="cpu")
