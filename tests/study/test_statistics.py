import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lmgeom.errors import RecordError
from lmgeom.study import paired, paired_arms, paired_curve, ratios, tokens_to_match
from lmgeom.study.statistics import (
    BLOCKS,
    EDGES,
    STRATA,
    Interval,
    arm_curves,
    comparison_table,
    factorial_effect,
    factorial_weights,
    matched_shares,
    paired_slope,
    paired_strata,
    paired_trend,
    strata_table,
    stratify,
    stratum,
    trials,
)

losses = st.lists(st.floats(1, 10), min_size=2, max_size=6)


@given(losses, st.floats(-1, 1))
def test_paired_agrees_with_scipy(a, shift):
    b = [x * (1 + 0.01 * i) + shift for i, x in enumerate(a)]
    difference = np.subtract(a, b)
    if np.ptp(difference) < 1e-6:
        return
    ours, theirs = paired(a, b), stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    np.testing.assert_allclose([ours.low, ours.high], theirs, rtol=1e-9, atol=1e-9)


@given(losses)
def test_paired_is_antisymmetric(a):
    b = a[::-1]
    assert paired(a, b).low == pytest.approx(-paired(b, a).high, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b"), [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, np.nan], [1.0, 1.0])]
)
def test_paired_refuses(a, b):
    with pytest.raises(ValueError, match=r"need two|finite"):
        paired(a, b)


def run(arm, seed, val, curve=()):
    points = [{"tokens": t, "val": v} for t, v in curve]
    return {"arm": arm, "seed": seed, "losses": {"val": val}, "curve": points}


def test_arms_are_paired_by_seed():
    records = [run("a", 0, 3.0), run("a", 2, 5.0), run("a", 1, 4.0)]
    records += [run("b", 1, 4.5), run("b", 2, 5.25), run("b", 7, 0.0)]
    assert paired_arms(records, "a", "b", "val").differences == (-0.5, -0.25)
    assert paired_arms(records[:4], "a", "b", "val") is None


def test_curves_are_paired_by_tokens():
    records = [
        run(arm, s, 0, [(10, s), (20, s + x)]) for arm, x in (("a", 0), ("b", 1)) for s in (1, 2)
    ]
    curve = paired_curve(records, "a", "b", "val")
    assert [(t, p.mean) for t, p in curve] == [(10, 0.0), (20, -1.0)]


FACTORS = ("lev", "taper", "head")
EFFECTS = [("lev",), ("taper",), ("head",), ("lev", "taper"), ("lev", "head"), ("taper", "head")]
EFFECTS += [FACTORS]


def coded(arm):
    """Half above or below zero for each factor that an arm has or lacks."""
    return [0.5 if name in arm.split("-") else -0.5 for name in FACTORS]


@given(st.lists(st.lists(st.floats(1, 10), min_size=8, max_size=8), min_size=2, max_size=5))
def test_effects_are_the_coefficients_of_least_squares(y):
    arms = list(factorial_weights(FACTORS, FACTORS))
    records = [run(a, s, v) for s, row in enumerate(y) for a, v in zip(arms, row, strict=True)]
    codes = np.array([coded(arm) for arm in arms])
    x = dict(zip(FACTORS, codes.T, strict=True))
    columns = [np.ones(8), *(np.prod([x[name] for name in effect], axis=0) for effect in EFFECTS)]
    fitted = np.linalg.lstsq(np.stack(columns, 1), np.transpose(y), rcond=None)[0][1:]
    found = [factorial_effect(records, FACTORS, effect, "val").differences for effect in EFFECTS]
    np.testing.assert_allclose(found, fitted, atol=1e-9)


def test_effects_that_were_put_in_come_out():
    put = {"lev": 0.2, "taper": -0.01, "head": -0.1}
    records = []
    for seed in range(3):
        for arm in factorial_weights(FACTORS, FACTORS):
            parts = set(arm.split("-"))
            both = 0.07 * ({"lev", "head"} <= parts) - 0.04 * (parts >= set(FACTORS))
            records.append(run(arm, seed, 5.0 + seed + both + sum(put.get(p, 0) for p in parts)))
    mean = {e: factorial_effect(records, FACTORS, e, "val").mean for e in EFFECTS}
    assert mean[("lev", "head")] == pytest.approx(0.07 - 0.04 / 2)
    assert mean[FACTORS] == pytest.approx(-0.04)
    assert mean[("taper",)] == pytest.approx(-0.01 - 0.04 / 4)
    assert mean[("lev",)] == pytest.approx(0.2 + 0.07 / 2 - 0.04 / 4)
    assert factorial_effect(records[:-2], FACTORS, ("lev",), "val").n == 2
    assert factorial_effect(records[:15], FACTORS, ("lev",), "val") is None


@pytest.mark.parametrize("effect", [(), ("width",)])
def test_an_unknown_effect_is_refused(effect):
    with pytest.raises(RecordError, match="unknown factor"):
        factorial_weights(FACTORS, effect)


@given(st.floats(-2, 2))
def test_ratios_are_two_readings_of_one_number(d):
    reduction, excess = ratios(d)
    assert (1 - reduction) * (1 + excess) == pytest.approx(1)


def test_tokens_to_match():
    curve = [(10, 5.0), (100, 4.0), (1000, 3.0)]
    assert tokens_to_match(curve, 4.0) == pytest.approx(100)
    assert tokens_to_match(curve, 3.5) == pytest.approx(10**2.5)
    assert tokens_to_match(curve, 6.0) == 10
    assert tokens_to_match(curve, 2.0) is None


WEIGHTS = {"val/a": 0.7, "val/b": 0.3}


def text(rng, n_documents, low=5, high=40):
    """Strata and documents of one split's targets: one row a token."""
    sizes = rng.integers(low, high, n_documents)
    documents = np.repeat(np.arange(n_documents), sizes)
    return rng.choice(7, len(documents), p=[0, 0, 0.1, 0.2, 0.2, 0.2, 0.3]), documents


def strata_run(arm, seed, splits):
    """A record of the losses {split: (strata, nats, documents)}."""
    sums = {name: stratify(*parts) for name, parts in splits.items()}
    return {"arm": arm, "seed": seed, "strata": {"weights": WEIGHTS, "splits": sums}}


def test_strata_have_fixed_edges():
    shares = np.array([0, 9e-8, 1e-7, 5e-6, 1e-5, 1e-4, 2e-3, 1e-2, 0.5])
    assert EDGES == (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    assert stratum(shares).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6]


def test_blocks_are_dealt_like_cards():
    documents = np.repeat(np.arange(3, 3 + 2 * BLOCKS + 5), 2)
    sums = stratify(np.zeros(len(documents), int), documents.astype(np.float32), documents)
    assert [row[0] for row in sums["counts"]] == [6] * 5 + [4] * (BLOCKS - 5)
    assert sums["nats"][0][0] == 2 * (3 + 3 + BLOCKS + 3 + 2 * BLOCKS)
    assert np.array(sums["counts"]).shape == np.array(sums["nats"]).shape == (BLOCKS, 7)


def test_stratum_means_equal_a_loop_over_tokens():
    rng = np.random.default_rng(1)
    texts = {"val/a": text(rng, 50), "val/b": text(rng, 4)}
    records, sums, shares = [], np.zeros(7), np.zeros(7)
    for seed in range(3):
        for arm in ("x", "y"):
            splits = {}
            for name, (strata, documents) in texts.items():
                nats = rng.gamma(4, 1, len(strata)).astype(np.float32)
                splits[name] = strata, nats, documents
                for s, loss in zip(strata, nats, strict=True):
                    sign = 1 if arm == "x" else -1
                    sums[s] += sign * WEIGHTS[name] * loss / len(strata) / 3
                    shares[s] += WEIGHTS[name] / len(strata) / 6
            records.append(strata_run(arm, seed, splits))
    found = paired_strata(records, "x", "y")
    for s in range(2, 7):
        assert found.interval([s]).mean == pytest.approx(sums[s] / shares[s], abs=1e-4)
    group = [4, 5, 6]
    expected = sums[group].sum() / shares[group].sum()
    assert found.interval(group).mean == pytest.approx(expected, abs=1e-4)
    contrast = found.interval([2], less=group)
    assert contrast.mean == found.interval([2]).mean - found.interval(group).mean
    assert contrast.low < contrast.mean < contrast.high
    assert (
        found.targets.tolist()
        == np.bincount(np.concatenate([part[0] for part in texts.values()]), minlength=7).tolist()
    )
    assert np.isnan(found.means([0])).all()
    with pytest.raises(ValueError, match=r"strata \[0, 1\] have no targets"):
        found.interval(group, less=[0, 1])
    one = paired_strata(records, "x", "y", "val/a")
    assert one.targets.sum() == len(texts["val/a"][0])


def made(rng, n_documents, seed_effect, document_effect, n_seeds=3):
    """Records of two arms whose difference is a seed effect plus a document effect."""
    texts = {name: text(rng, n, 20, 21) for name, n in zip(WEIGHTS, n_documents, strict=True)}
    effects = {
        name: document_effect * rng.standard_normal(n_documents[i]) for i, name in enumerate(texts)
    }
    records = []
    for seed in range(n_seeds):
        shift = seed_effect * rng.standard_normal()
        for arm in ("x", "y"):
            splits = {}
            for name, (strata, documents) in texts.items():
                nats = np.full(len(strata), 3.0) + (arm == "x") * (shift + effects[name][documents])
                splits[name] = strata, nats, documents
            records.append(strata_run(arm, seed, splits))
    return records


def test_without_documents_the_interval_is_students():
    records = made(np.random.default_rng(2), (30, 5), 0.1, 0.0)
    found = paired_strata(records, "x", "y", replicates=20_000).interval(range(7))
    shifts = [
        np.sum(x["strata"]["splits"]["val/a"]["nats"])
        - np.sum(y["strata"]["splits"]["val/a"]["nats"])
        for x, y in zip(records[::2], records[1::2], strict=True)
    ]
    expected = paired(np.array(shifts) / 600, np.zeros(3))
    assert found.mean == pytest.approx(expected.mean, abs=1e-4)
    assert (found.high - found.low) / (expected.high - expected.low) == pytest.approx(1, abs=0.05)


def test_without_seeds_the_spread_is_the_standard_error_of_documents():
    """Four blocks of equal size: drawing m - 1 of them gives s / sqrt(m), drawing m would not."""
    records = made(np.random.default_rng(3), (4, 6), 0.0, 0.5)
    values = paired_strata(records, "x", "y", replicates=40_000).means(range(7))
    error = 0.0
    for name, weight in WEIGHTS.items():
        blocks = [np.sum(r["strata"]["splits"][name]["nats"], axis=1) / 20 for r in records[:2]]
        difference = blocks[0] - blocks[1]
        error += (weight * difference.std(ddof=1)) ** 2 / len(difference)
    assert values[1:].std() == pytest.approx(np.sqrt(error), rel=0.03)


@pytest.mark.parametrize(("seed_effect", "document_effect"), [(0.1, 0.0), (0.03, 0.3), (0.0, 0.3)])
def test_the_interval_covers(seed_effect, document_effect):
    rng, hits = np.random.default_rng(4), 0
    for _ in range(200):
        records = made(rng, (40, 12), seed_effect, document_effect)
        found = paired_strata(records, "x", "y", replicates=300).interval([5, 6])
        hits += found.low <= 0 <= found.high
    assert 0.9 < hits / 200 < 0.99


def test_an_interval_is_the_same_at_every_call():
    records = made(np.random.default_rng(5), (9, 4), 0.1, 0.1)
    first, again = (paired_strata(records, "x", "y").interval([5]) for _ in range(2))
    assert first == again


def test_strata_refuse_what_cannot_be_compared():
    records = made(np.random.default_rng(6), (9, 4), 0.1, 0.1)
    assert paired_strata(records[:2], "x", "y") is None
    assert paired_strata(records, "x", "z") is None
    with pytest.raises(RecordError, match="unknown split 'val/c'; known: val, val/a, val/b"):
        paired_strata(records, "x", "y", "val/c")
    records[0]["strata"]["splits"]["val/a"]["counts"][0][2] += 1
    with pytest.raises(RecordError, match="scored different targets"):
        paired_strata(records, "x", "y")
    with pytest.raises(RecordError, match="x-seed0 has no losses by stratum"):
        paired_strata([run(arm, seed, 1.0) for arm in "xy" for seed in (0, 1)], "x", "y")


def sized(arm, seed, val, total):
    return run(arm, seed, val) | {"parameters": {"total": total}}


def test_a_slope_is_fitted_for_each_seed():
    rng, totals = np.random.default_rng(7), (10**6, 3 * 10**6, 10**7)
    d = rng.standard_normal((4, 3))
    records = [
        sized(f"{arm}{j}", seed, 4.0 + (arm == "x") * d[seed, j], totals[j] if arm == "y" else 5)
        for seed in range(4)
        for j in range(3)
        for arm in "xy"
    ]
    pairs = [(f"x{j}", f"y{j}") for j in range(3)]
    expected = [stats.linregress(np.log2(totals), row).slope for row in d]
    found = paired_slope(records, pairs, "val")
    np.testing.assert_allclose(found.differences, expected, rtol=1e-6)
    assert (found.low, found.high) == pytest.approx(
        stats.ttest_1samp(expected, 0).confidence_interval(0.95)
    )
    assert paired_slope(records[:12], pairs, "val").n == 2
    assert paired_slope(records[:6], pairs, "val") is None
    assert paired_slope(records, [*pairs, ("x3", "y3")], "val") is None
    with pytest.raises(RecordError, match="y0, y0 have the same size"):
        paired_slope(records, [pairs[0]] * 2, "val")


def test_matched_shares_are_of_the_baselines_budget():
    records = [
        run("x", 0, 3.0, [(100, 5.0), (200, 4.0), (400, 3.0)]),
        run("y", 0, 3.5, [(100, 5.5), (200, 4.5), (400, 4.0)]),
        run("x", 1, 3.0, [(100, 5.0), (200, 4.8), (400, 4.6)]),
        run("y", 1, 3.5, [(100, 5.5), (200, 4.5), (400, 4.0)]),
        run("x", 2, 3.0, [(100, 5.0)]),
    ]
    assert matched_shares(records, "x", "y", "val") == {0: pytest.approx(0.5), 1: None}


def test_intervals_are_written_in_one_way():
    assert str(paired([1.0, 2.0], [1.5, 2.5])) == "-0.5000 [-0.5000, -0.5000]"
    assert f"{Interval(0.1, -0.00004, 0.2)}" == "+0.1000 [-0.0000, +0.2000]"


def test_comparisons_name_who_and_where_and_what_is_missing():
    records = [run("a", seed, 4.0) for seed in (0, 1)] + [run("b", seed, 4.1) for seed in (0, 1)]
    rows = comparison_table(records, [("a", "b"), ("a", "c")], ["val"])
    assert rows["arms"] == ("a minus b", "a minus c")
    assert rows["nats, 95 % interval"] == ("-0.1000 [-0.1000, -0.1000]", "fewer than two pairs")
    assert rows["perplexity saved"][0] == "+9.52%"
    assert rows["perplexity added"] == ("+10.52%", "")
    with pytest.raises(RecordError, match="unknown metric 'c4'"):
        comparison_table(records, [("a", "b")], ["c4"])


def test_a_point_without_a_value_is_left_out():
    curve = [{"tokens": 1, "head/excess": None}, {"tokens": 2, "head/excess": 0.5}]
    record = {"arm": "a", "seed": 0, "curve": curve}
    assert arm_curves([record], "a", "head/excess") == {0: {2: 0.5}}


def test_trials_are_those_of_one_arm_in_order_of_the_rate():
    made = [("lev-lr2", 2, 5.0), ("lev-lr1", 1, 6.0), ("lev-permuted-lr1", 1, 7.0)]
    records = [run(arm, 0, val) | {"config": {"train": {"lr": lr}}} for arm, lr, val in made]
    assert trials(records, "lev") == [(1, 6.0), (2, 5.0)]
    assert trials(records, "tied") == []


def test_a_trend_reads_the_second_half():
    gap = {10: 9.0, 20: 0.3, 30: 0.3 + 0.1 * np.log2(1.5), 40: 0.4}
    records = [run("a", s, 0, [(t, 5 + s + d) for t, d in gap.items()]) for s in (0, 1)]
    records += [run("b", s, 0, [(t, 5 + s) for t in gap]) for s in (0, 1)]
    assert paired_trend(records, "a", "b", "val").mean == pytest.approx(0.1)
    assert paired_trend(records[:3], "a", "b", "val") is None
    once = [r | {"curve": r["curve"][:1]} for r in records]
    assert paired_trend(once, "a", "b", "val") is None


def test_strata_with_few_targets_are_left_out():
    assert [float(name.strip("<>")) for name in STRATA] == [EDGES[0], *EDGES[:-1], EDGES[-1]]
    strata, documents = np.array([2] * 5 + [4] * 20), np.arange(25) % 5
    nats = strata.astype(np.float32)
    records = [
        strata_run(arm, seed, {"val/a": (strata, nats + shift, documents)})
        for arm, shift in (("x", 0), ("y", 0.5))
        for seed in (0, 1)
    ]
    found = paired_strata(records, "x", "y", "val/a")
    assert [(k, n) for k, n, _ in found.rows(1)] == [(2, 5), (4, 20)]
    ((k, n, interval),) = found.rows(6)
    assert (k, n) == (4, 20)
    assert interval == pytest.approx((-0.5, -0.5, -0.5))
    columns = strata_table({"x minus y": found.rows(6), "x minus z": []})
    assert list(columns.values()) == [
        ("x minus y",),
        ("1e-4",),
        (20,),
        ("-0.5000 [-0.5000, -0.5000]",),
    ]
    assert strata_table({"x minus z": []}) == {}
