"""csrc/policy_math.h, compiled by itself, and the reference: the first answer of ``make check``."""

import ctypes
import math
import os
import shlex
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from accuracy import assert_rounded, assert_sums

from bapo_kernels import BAPOConfig
from bapo_kernels.config import KL_LOSS_TYPES, SURROGATES
from bapo_kernels.reference import search
from bapo_kernels.reference.loss import _token_terms
from bapo_kernels.reference.tokens import ratios

SOURCE = Path(__file__).with_name("policy_math.cpp")
CXX = shlex.split(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    out = tmp_path_factory.mktemp("policy_math") / "policy_math.so"
    flags = "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"
    header = f"-I{SOURCE.parents[1] / 'csrc'}"
    subprocess.run([*CXX, *flags, header, str(SOURCE), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.terms.argtypes = ctypes.c_int64, *[ctypes.c_void_p] * 3
    library.quantity.restype = ctypes.c_double
    library.quantity.argtypes = ctypes.c_double, ctypes.c_double, ctypes.c_bool
    of_masses = ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_double] * 3
    library.masses.argtypes = *of_masses, ctypes.c_bool, ctypes.c_bool, ctypes.c_void_p
    return library


TOKEN = "log-prob", "old log-prob", "ref log-prob", "advantage", "weight", "lower", "upper"


def edges():
    """Log-probs, log-ratios at the clamp and on a bound of 1, bad old log-probs, every sign."""
    log_ratios = 0.0, 0.25, -0.25, 20.0, -20.0, 20.5, -20.5, math.inf, -math.inf, math.nan
    kl = 0.0, 0.5, -0.5, 3.0, 20.0, -20.0, 20.5, math.inf
    bounds = (1.0, 1.0), (0.8, 1.2), (0.0, math.inf)
    chosen = product((0.0, -0.75, -math.inf), log_ratios, kl, (0.0, 2.0, -1.5), (1.0, 0.5), bounds)
    rows = [(z, z - x if z > -9 else x, z - d, A, w, *both) for z, x, d, A, w, both in chosen]
    return torch.tensor(rows, dtype=torch.float64)


def random(count=3_000):
    z = -5 * torch.rand(count, dtype=torch.float64)
    old, ref = (z + scale * torch.randn_like(z) for scale in (0.4, 2.0))
    lower, upper = 0.3 + 0.6 * torch.rand_like(z), 1.1 + torch.rand_like(z)
    return torch.stack([z, old, ref, torch.randn_like(z), torch.rand_like(z), lower, upper], 1)


CONFIGS = [
    *({"surrogate": name} for name in SURROGATES),
    {"clip_ratio_c": 3.0},
    {"surrogate": "sapo", "sapo_tau_pos": 1.5, "sapo_tau_neg": 0.5},
    *({"kl_loss_type": name, "kl_loss_coef": 0.1} for name in KL_LOSS_TYPES),
]


RESULTS = (
    *("ratio", "log_ratio", "loss", "grad", "clipped", "dual_clipped", "kl", "dkl"),
    *("clipped_mass", "kept_mass"),
)


def terms_of(library, config, tokens):
    first, last = map(config.options._fields.index, ("surrogate", "entropy_coef"))
    options = torch.tensor(config.options[first : last + 1], dtype=torch.float64)
    got = torch.empty(len(tokens), len(RESULTS), dtype=torch.float64)
    library.terms(len(tokens), *(x.data_ptr() for x in (tokens, options, got)))
    return dict(zip(RESULTS, got.unbind(1), strict=True))


@pytest.mark.parametrize("tokens", [edges, random])
@pytest.mark.parametrize("options", CONFIGS, ids=lambda each: "-".join(map(str, each.values())))
def test_terms(library, options, tokens, monkeypatch):
    # Without a derivative of torch.clamp: at the limits it depends on the version of torch.
    clamp = torch.clamp
    monkeypatch.setattr(torch, "clamp", lambda x, *limits: clamp(x.detach(), *limits))
    config, tokens = BAPOConfig(**options), tokens()
    got = terms_of(library, config, tokens)
    z, old, ref, A, weight, *bounds = tokens.unbind(1)
    z = z.clone().requires_grad_()
    r, log_ratio = ratios(z, old, torch.ones_like(z, dtype=torch.bool), "token")
    terms = _token_terms(config, z, r, A, bounds, weight, ref, torch.zeros_like(z))
    grad, dkl = (torch.autograd.grad(x.sum(), z, retain_graph=True)[0] for x in terms[1:3])
    # What a result is the difference of, or a factor of the slope.
    size = 4 * (A * weight).abs() * r.clamp(min=1) * (1 + z.abs().clamp(max=9))
    of_kl = (ref - z).clamp(-20, 20).exp() + 21
    expected = dict(
        ratio=(r, r),
        log_ratio=(log_ratio, log_ratio),
        loss=(terms.policy, size),
        grad=(grad, size),
        clipped=(terms.clipped.double(), torch.zeros_like(z)),
        dual_clipped=(terms.dual_clipped.double(), torch.zeros_like(z)),
        kl=(terms.kl, of_kl),
        dkl=(config.kl_loss_coef * dkl, of_kl),
    )
    assert got["grad"][old.isnan()].isnan().all()
    defined = dict(grad=terms.policy.isfinite(), dkl=terms.kl.isfinite())
    for name, (value, of) in expected.items():
        ok = defined.get(name, slice(None))
        inputs = dict(zip(TOKEN, tokens[ok].unbind(1), strict=True))
        assert_rounded(got[name][ok], value[ok].detach(), 16, of.detach()[ok], name, inputs)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("weight", ["rollout_prob", "uniform"])
@pytest.mark.parametrize("step", [0.05, 0.07, 0.0], ids=lambda step: f"step {step}")
def test_masses(library, step, weight, contribution):
    """At every point of both grids; ratios of exactly 1 lie on a point of each."""
    config = BAPOConfig(
        ratio_lower_start=0.5,
        ratio_lower_max=1.0,
        ratio_lower_step=step,
        ratio_upper_start=1.0,
        ratio_upper_max=2.0,
        ratio_upper_step=step,
        token_weight=weight,
        contribution=contribution,
    )
    tokens = random()
    tokens[::10, 1] = tokens[::10, 0]
    z, old, _, A, *_ = tokens.unbind(1)
    only, r = contribution == "gradient", (z - old).exp()
    w = old.exp() if weight == "rollout_prob" else torch.ones_like(z)
    expected = search.contribution_table(config, z, old, A.float(), None)
    A = A.float().double()
    found, places = [], []
    for negative in (True, False):
        side = (A < 0) == negative
        given = [x[side].contiguous() for x in (r, w * A.abs())]
        grid = config.options[:3] if negative else config.options[3:6]
        table = torch.empty(1_024, dtype=torch.float64)
        pointers = [x.data_ptr() for x in given]
        points = library.masses(len(given[0]), *pointers, *grid, negative, only, table.data_ptr())
        found.append(table[:points])
        places += [
            (point, negative) for point in (config.lower_grid if negative else config.upper_grid)
        ]
    assert_sums(torch.cat(found), expected, len(tokens), name="masses")
    # What one token adds, summed up: at every point again.
    for (point, negative), mass in zip(places, expected, strict=True):
        tokens[:, 3], tokens[:, 5:] = A, point
        one = terms_of(library, config, tokens)["kept_mass" if only else "clipped_mass"]
        name = f"mass at {point} of each token"
        assert_sums((w * one)[(A < 0) == negative].sum(), mass, len(tokens), name=name)


@pytest.mark.parametrize("kind", ["share", "ratio"])
def test_tested_quantity(library, kind):
    masses = torch.tensor([0.0, 1e-9, 0.5, 3.0, math.inf, math.nan], dtype=torch.float64)
    for pos, neg in torch.cartesian_prod(masses, masses):
        got = torch.tensor(library.quantity(pos, neg, kind == "ratio"), dtype=torch.float64)
        assert_rounded(
            got, search.tested_quantity(pos, neg, kind), 2, name=f"{kind} of {pos}, {neg}"
        )
