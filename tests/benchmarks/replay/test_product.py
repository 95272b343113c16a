"""Runs as the product is given them, and long sequences as it predicts them."""

from dataclasses import replace

import pytest

from benchmarks.models import find_family
from benchmarks.published import DATA
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.predict import predict
from benchmarks.replay.product import ATTENTION, CONTEXT, DATA_AXIS, TENSOR, inputs_of
from benchmarks.replay.records import read_records, read_run
from benchmarks.replay.software import Knowledge

# Sequences of 32,768 and 131,072 tokens over four and eight ranks.
LONG = (
    "simumax-llama3_70b_l12_tp1_cp8_pp1_dp1_seq131072_mbc4_cef",
    "simumax-llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef",
    "simumax-llama3_405b_l4_tp1_cp8_pp1_dp1_seq32768_mbc4_cef",
    "simumax-llama3_405b_l4_tp2_cp4_pp1_dp1_seq32768_mbc4_cef",
)
RECORDS = {str(record["id"]): record for record in read_records(DATA)}


@pytest.mark.parametrize(("travel", "method"), [("all-gather", "queries@8192"), ("p2p", "ring@8192"), ("a2a", "heads")])
def test_sequences_are_split_on_an_axis_of_their_own(travel: str, method: str) -> None:
    """In stripes, beside a tensor axis that splits what is left; attention by the method of the software."""
    name = LONG[1]
    run = read_run(RECORDS[name], name)
    family = find_family(run.dimensions)
    assert family is not None
    run = replace(run, parallel=replace(run.parallel, context_method=travel))
    inputs = inputs_of(run, family, cluster_of(run)[1])
    assert dict(inputs.mesh) == {CONTEXT: 4, TENSOR: 2}
    assert inputs.constraints[ATTENTION] == {"method": {CONTEXT: method}}
    assert inputs.constraints[family.norm]["in"] == {CONTEXT: "S(1, 8192)", TENSOR: "S(1)"}
    four = replace(run, parallel=replace(run.parallel, data=4, zero=1, shards=16))
    assert dict(inputs_of(four, family, cluster_of(run)[1]).mesh) == {DATA_AXIS: 4, CONTEXT: 4, TENSOR: 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_sequences_are_predicted(name: str) -> None:
    """Step times as they are, and memory with facts."""
    found = predict(RECORDS[name], name)
    told, plain = found[Knowledge.ALL], found[Knowledge.NOTHING]
    assert plain.error is not None
    assert abs(plain.error) < 0.10
    assert told.memory_error is not None
    assert abs(told.memory_error) < 0.10
