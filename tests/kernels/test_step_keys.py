"""Keys on the device are those that the host computes, and masks by either are the same bits."""

import torch

from mpctl.kernels.counter_rng import CounterRNG, StepKeys, as_int32, dropout_key

SITES = {"": ("embedding",), "layers.0": ("attention", "mlp"), "layers.10": ("attention", "mlp")}


def test_the_table_holds_the_keys_of_the_step_that_it_was_filled_for() -> None:
    keys = StepKeys(SITES, 7, torch.device("cpu"))
    for step in (3, 4, 5):
        keys.fill(step)
        assert int(keys[""]["embedding"]) == as_int32(dropout_key(7, step, "embedding"))
        assert int(keys["layers.10"]["mlp"]) == as_int32(dropout_key(7, step, "layers.10.mlp"))
    assert tuple(keys) == tuple(SITES) and len(keys) == 3
    assert len({int(key) for own in keys.values() for key in own.values()}) == 5


def test_dropout_by_keys_on_the_device_is_dropout_by_keys_of_the_host() -> None:
    keys = StepKeys(SITES, 7, torch.device("cpu"))
    keys.fill(9)
    x, samples = torch.randn(2, 6, 16), torch.tensor([5, 11])
    host, device = CounterRNG(7, 9, samples), keys.rng(samples)
    for scope, own in SITES.items():
        for site in own:
            dropped = host.within(scope).dropout(x, 0.3, rng_site=site)
            assert torch.equal(dropped, device.within(scope).dropout(x, 0.3, rng_site=site))
            name = f"{scope}.{site}".lstrip(".")
            assert torch.equal(dropped, host.dropout(x, 0.3, rng_site=name))
            assert 0 < int((dropped == 0).sum()) < x.numel()
