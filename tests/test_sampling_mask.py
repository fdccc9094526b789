"""Sampling masks: as if every logit outside of the sets were -inf, on every backend."""

import pytest
import torch
from helpers import case_with_sets, check_with_sets
from test_loss import OPTIONS, build_config

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, device, statistics, name):
    config_options, call_options = OPTIONS[name]
    config, outside = build_config(config_options), name not in ("k1", "k2")
    case, mask = case_with_sets(device=device, config=config, outside=outside, **call_options)
    check_with_sets(case, mask, backend, statistics=statistics)
