"""Keys on the device are those that the host computes, and masks by either are the same bits."""

import torch

from mpctl.kernels.counter_rng import CounterRNG, as_int32, dropout_key
from mpctl.kernels.step_keys import StepKeys

SITES = ("layers.0.attention", "layers.0.mlp", "embedding")


def test_the_table_holds_the_keys_of_the_step_that_it_was_filled_for():
    keys = StepKeys(SITES, 7, torch.device("cpu"))
    for step in (3, 4, 5):
        keys.fill(step)
        assert {site: int(keys[site]) for site in SITES} == {
            site: as_int32(dropout_key(7, step, site)) for site in SITES
        }


def test_dropout_by_keys_on_the_device_is_dropout_by_keys_of_the_host():
    keys = StepKeys(SITES, 7, torch.device("cpu"))
    keys.fill(9)
    x, samples = torch.randn(2, 6, 16), torch.tensor([5, 11])
    host, device = CounterRNG(7, 9, samples), CounterRNG(7, 9, samples, keys=keys)
    for site in SITES:
        dropped = host.dropout(x, 0.3, rng_site=site)
        assert torch.equal(dropped, device.dropout(x, 0.3, rng_site=site))
        assert 0 < int((dropped == 0).sum()) < x.numel()
    assert tuple(keys) == SITES and len(keys) == len(SITES)
