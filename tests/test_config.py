"""BAPOConfig: presets, and every bad value refused at construction."""

import dataclasses
import functools
import inspect
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from bapo_kernels import BAPOConfig
from bapo_kernels.bounds import TABLE_FIELDS
from bapo_kernels.reference.search import contribution_table


def test_paper_is_the_default():
    config = BAPOConfig()
    assert BAPOConfig.paper() == config
    assert (len(config.lower_grid), len(config.upper_grid)) == (16, 38)
    assert (config.lower_grid[0], config.lower_grid[-1]) == (0.6, 0.9)
    assert (config.upper_grid[0], config.upper_grid[-1]) == (1.2, 3.0)  # the last step: a hair less
    assert (config.target, config.target_kind, config.raise_first) == (0.4, "share", "upper")
    assert (config.token_weight, config.clip_ratio_c) == ("rollout_prob", None)


def test_recipe_matches_the_authors_code():
    config = BAPOConfig.recipe()
    assert (len(config.lower_grid), len(config.upper_grid)) == (5, 17)
    assert (config.lower_grid[-1], config.upper_grid[-1]) == (0.8, 2.0)
    assert (config.target, config.target_kind, config.raise_first) == (1.0, "ratio", "lower")
    assert (config.token_weight, config.clip_ratio_c) == ("uniform", 3.0)


BAD = {
    "temperature": [0.0, -1.0, math.nan, math.inf, "1"],
    "logit_scale": [0.0, -1.0, math.nan],
    "final_logit_softcapping": [0.0, -3.0, math.inf],
    "loss_scale_factor": [0.0, -1.0],
    "clip_ratio_c": [1.0, 0.5, math.inf],
    "kl_loss_coef": [math.nan, math.inf],
    "entropy_coef": [math.nan],
    "target": [-0.1, 1.1, math.nan],
    "target_kind": ["mean"],
    "raise_first": ["both"],
    "token_weight": ["prob"],
    "contribution": ["loss"],
    "kl_loss_type": ["k4", "kl"],
    "loss_agg_mode": ["mean"],
    "ratio_lower_start": [-0.1, math.nan],
    "ratio_lower_max": [0.5, math.inf, 1.1],  # below its start, infinite, no lower bound
    "ratio_lower_step": [-0.1, math.nan, 1e-9],  # the last would give millions of points
    "ratio_upper_start": [math.nan, 0.28],  # the last is an epsilon
    "ratio_upper_max": [1.1, math.inf],
    "ratio_upper_step": [-1.0, 1e-6],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_bad_values_are_refused(name, value):
    with pytest.raises(ValueError, match=r"must be .*, got ") as error:
        BAPOConfig(**{name: value})
    assert str(error.value).startswith(name)


def test_ratio_target_has_no_upper_limit():
    assert BAPOConfig(target_kind="ratio", target=7.0).target == 7.0
    with pytest.raises(ValueError, match="target must be finite and >= 0, got -1"):
        BAPOConfig(target_kind="ratio", target=-1.0)


def test_frozen_pickle_asdict_and_replace():
    """A config is pickled to workers, logged as a dictionary, and checked again by replace."""
    config = BAPOConfig.recipe(entropy_coef=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target = 0.5
    assert pickle.loads(pickle.dumps(config)) == config
    assert BAPOConfig(**dataclasses.asdict(config)) == config
    assert dataclasses.replace(config, target=0.5).target == 0.5
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        dataclasses.replace(config, temperature=0)


def test_presets_can_be_overridden_and_nothing_is_ignored():
    config = BAPOConfig.fixed(0.8, 1.28, clip_ratio_c=3.0)
    assert (config.lower_grid, config.upper_grid, config.clip_ratio_c) == ([0.8], [1.28], 3.0)
    assert BAPOConfig.paper(ratio_upper_max=2.0).upper_grid[-1] == 2.0
    assert BAPOConfig.recipe(target=0.5).target == 0.5
    with pytest.raises(ValueError, match=r"lower must be <= 1 .*swapped.*, got 1.2 and 0.8"):
        BAPOConfig.fixed(1.2, 0.8)
    with pytest.raises(ValueError, match=r"ratio_lower_max must be <= 1, a bound of the ratio"):
        BAPOConfig.fixed(1.2, 1.3)
    with pytest.raises(ValueError, match=r"ratio_upper_start must be >= 1, .* not an epsilon, got"):
        BAPOConfig.fixed(0.2, 0.28)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("entropy_coeff", "entropy_coef"),
        (
            "clip_ratio_low",
            "ratio_lower_max and ratio_upper_start, bounds of the ratio (BAPOConfig.fixed)",
        ),
        ("delta", "clip_ratio_c"),
        ("importance_sampling_level", "ratio_level"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_option_says_which_is_meant(name, meant):
    hint = f", did you mean {re.escape(meant)}[?]$" if meant else "$"
    unknown = f"^BAPOConfig\\(\\) got an unexpected keyword argument '{name}'{hint}"
    replace = functools.partial(dataclasses.replace, BAPOConfig())
    for make in (BAPOConfig, BAPOConfig.paper, BAPOConfig.recipe, replace):
        with pytest.raises(TypeError, match=unknown):
            make(**{name: 0.2})
    names = [field.name for field in dataclasses.fields(BAPOConfig)]
    assert [*inspect.signature(BAPOConfig).parameters] == names


NUMBERS = [f.name for f in dataclasses.fields(BAPOConfig) if f.type in ("float", "float | None")]


def test_numbers_of_any_type_make_equal_configs():
    """They compare, hash and pickle the same, because each is stored as a float."""
    numbers = dict(temperature=2, target=0.5, clip_ratio_c=3, ratio_lower_step=0.125)
    plain = BAPOConfig(**{name: float(value) for name, value in numbers.items()})
    for of in (np.float32, np.float64, Fraction, Decimal, np.float16):
        config = BAPOConfig(**{name: of(value) for name, value in numbers.items()})
        assert config == plain
        for function in (hash, repr, pickle.dumps):
            assert function(config) == function(plain)
    for of in (int, np.int64):
        assert repr(BAPOConfig.fixed(of(1), of(1))) == repr(BAPOConfig.fixed(1.0, 1.0))


@pytest.mark.parametrize("name", NUMBERS)
def test_values_that_are_not_numbers_are_refused(name):
    """The message names the type that is wrong."""
    assert {"target", "clip_ratio_c"} < set(NUMBERS)
    wrong = {
        r"be a number \(.item\(\) of a tensor or array\), got Tensor": torch.tensor(1.0),
        r"be a number \(.item\(\) of a tensor or array\), got ndarray": np.array(1.0),
        r"be a number, got True \(bool\)": True,
        r"be a number, got '1' \(str\)": "1",
        r"be in the range of float64, got a larger int": 10**400,
        r"be in the range of float64, got a larger Fraction": Fraction(10**400),
        r"be a number, got \[1.0\] \(list\)": [1.0],
        r"be a number.*, got bool": np.bool_(True),
    }
    for message, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} must {message}"):
            BAPOConfig(**{name: value})
    if getattr(BAPOConfig(), name) is not None:
        with pytest.raises(ValueError, match=f"^{name} must be a number, got None"):
            BAPOConfig(**{name: None})


# Another value of every field.
OTHER = dict(
    ratio_lower_start=0.7, ratio_lower_max=0.8, ratio_lower_step=0.05, ratio_upper_start=1.1,
    ratio_upper_max=2.0, ratio_upper_step=0.1, target=0.5, target_kind="ratio",
    raise_first="lower", token_weight="uniform", contribution="gradient", surrogate="cispo",
    ratio_level="sequence", clip_ratio_c=3.0, sapo_tau_pos=2.0, sapo_tau_neg=2.0,
    kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.1, temperature=0.5, logit_scale=2.0,
    final_logit_softcapping=30.0, loss_agg_mode="token-sum", loss_scale_factor=2.0,
)  # fmt: skip


def test_fields_that_the_table_of_a_search_depends_on():
    """Tables of calls are added up only where these agree."""
    assert set(OTHER) == {field.name for field in dataclasses.fields(BAPOConfig)}
    old, A = -torch.rand(4, 9), torch.randn(4, 9)
    tokens = old + torch.randn(4, 9), old, A, None

    def table(**options):
        return contribution_table(BAPOConfig(**options), *tokens)

    changed = [name for name in OTHER if not torch.equal(table(**{name: OTHER[name]}), table())]
    assert set(changed) == set(TABLE_FIELDS)
