"""The input of `mpctl fit`: data, lengths, batches, prices."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.fit.request import FitData, batch_of, named_gpus, read_prices, read_request


def refused(model: str = "llama-3-8b", gpus: str = "1xh100", **more: Any) -> tuple[str, str, str]:
    with pytest.raises(InputError) as caught:
        read_request(model, gpus, **{"data": FitData(), "settings": {}, **more})
    issue = caught.value.issues[0]
    assert issue.message and issue.hint
    return issue.rule, issue.where, f"{issue.message} {issue.hint}"


def test_rows_are_2048_tokens_or_all_that_the_model_reads() -> None:
    assert read_request("llama-3-8b", "1xh100", data=FitData(), settings={}).seq_length == 2048
    gpt2 = read_request("gpt2", "1xh100", data=FitData(), settings={})
    assert gpt2.seq_length == 1024 and gpt2.length_text == "all that the model reads"
    longest = read_request("llama-3-8b", "1xh100", data=FitData(), settings={}, seq_length=8192)
    assert longest.job.model is not None and longest.job.model.seq_length == 8192


def test_packed_samples_take_fewer_steps_than_padded_ones() -> None:
    data = FitData(samples=1000, epochs=3, mean_length=500)
    assert data.steps(2048, 64) == 3 * 4  # 245 rows
    assert data.steps(2048, 64, is_packed=False) == 3 * 16
    assert FitData(samples=1000).steps(2048, 64) == 3 * 16
    assert FitData(tokens=2048 * 64 * 5 + 1).steps(2048, 64) == 6


def test_a_batch_divides_over_the_gpus() -> None:
    assert [batch_of(gpus, {}) for gpus in (1, 4, 6, 64, 96)] == [64, 64, 66, 64, 96]
    rule, where, text = refused(gpus="3xh100", settings={"training.global_batch_size": 16})
    assert (rule, where) == ("batch-divides", "--global-batch-size") and "15 or 18" in text


def test_a_setting_of_the_cluster_holds_on_other_gpus() -> None:
    request = read_request("llama-3-8b", "1xh100", data=FitData(), settings={"cluster.headroom": 20.0})
    gpus = named_gpus("a100-80gb", 2)
    assert gpus is not None
    other = request.on(gpus).job.cluster
    assert other.headroom == 20 and other.gpus_per_node == 2 and other.nodes == 1


def test_prices_are_never_invented() -> None:
    assert read_prices([], None) == {}
    request = read_request("llama-3-8b", "2xh100", data=FitData(), settings={}, prices=["a100=1"])
    assert request.price("dgx-h100") is None and request.price("dgx-a100") == 1.0
    request = read_request("llama-3-8b", "2xh100", data=FitData(), settings={}, prices=["2.5"])
    assert request.price("dgx-h100") == 2.5 and request.price("dgx-a100") is None


@pytest.mark.parametrize(
    ("more", "rule", "said"),
    [
        ({"model": "llama3"}, "unknown-preset", "llama-3-8b"),
        ({"model": "nobody/nothing"}, "unknown-preset", "--fetch"),
        ({"gpus": "1xh101"}, "bad-gpus", "h100"),
        ({"gpus": "4"}, "bad-gpus", "4xh100"),
        ({"gpus": "4,8xh100"}, "bad-gpus", "--gpus any"),
        ({"gpus": "any", "cluster": "dgx-h100"}, "bad-gpus", "--gpus 4"),
        ({"seq_length": 9000}, "longer-than-positions", "8192"),
        ({"seq_length": 0}, "longer-than-positions", "1 to 8,192"),
        ({"data": FitData(samples=0)}, "bad-value", "--samples 1000"),
        ({"data": FitData(samples=5, epochs=0)}, "bad-value", "0 is not"),
        ({"data": FitData(tokens=5, samples=5)}, "given-twice", "leave one"),
        ({"data": FitData(tokens=5, epochs=2)}, "no-samples", "--samples"),
        ({"data": FitData(mean_length=5)}, "no-samples", "--samples"),
        ({"data": FitData(samples=5, mean_length=4000)}, "longer-than-rows", "2,048"),
        ({"settings": {"parallel.tp": 2}}, "chosen-by-rows", "mpctl plan"),
        ({"settings": {"training.adapter.kind": "dora"}}, "chosen-by-rows", "'dora'"),
        ({"settings": {"cluster.nodes": 2}}, "has-option", "--gpus"),
        ({"settings": {"model.seq_length": 512}}, "has-option", "--seq-length"),
        ({"prices": ["h101=2"]}, "bad-gpus", "h100"),
        ({"prices": ["h100=-2"]}, "bad-price", "'h100=-2'"),
        ({"prices": ["h100=nan"]}, "bad-price", "above 0"),
        ({"prices": ["cheap"]}, "bad-price", "--price 1.8"),
        ({"prices": ["2"], "gpus": "any"}, "bad-price", "which GPU"),
    ],
)
def test_bad_input_is_refused_with_its_bound_and_a_way_out(more: dict[str, Any], rule: str, said: str) -> None:
    found, where, text = refused(**more)
    assert found == rule and where and said in text


def test_a_count_of_a_cluster_s_gpus() -> None:
    request = read_request("llama-3-8b", "4", data=FitData(), settings={}, cluster="jean-zay")
    assert request.job.world_size == 4 and request.settings["cluster"] == "jean-zay"
