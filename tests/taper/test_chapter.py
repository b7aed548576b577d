"""The chapter on the taper studies: its sentences follow the records, whatever these say."""

import importlib.util
import shutil
from importlib.util import spec_from_file_location

import pytest

from lmgeom.study import judge, load_claims, paths
from lmgeom.study.records import FIELDS, record
from lmgeom.study.run import load_study
from lmgeom.taper import widths_by_alignment

SCRIPT = paths.root() / "tests" / "study" / "test_experiments.py"
experiments = importlib.util.module_from_spec(spec_from_file_location("experiments", SCRIPT))
experiments.__spec__.loader.exec_module(experiments)
SPLITS = ("val", "wiki_ood", "c4_ood", "lambada")
MIDDLE = [0.2, 0.1, 0.05, 0.02, 0.01, 0.03, 0.06, 0.11, 0.21]
RISING = [0.01 * layer for layer in range(9)]


def show(results, monkeypatch):
    """Variables of the chapter on a folder of records."""
    return experiments.run_cells("04_taper", results, monkeypatch, frozenset({"tapers-yours"}))


def invent(run, loss, folder, profile=MIDDLE, r=0.5):
    """Store a made-up record of a run, the same loss on every text."""
    entry = dict.fromkeys(FIELDS, "made up") | {"study": run.study, "arm": run.arm, "id": run.id}
    entry |= {"seed": run.seed, "config": run.config, "tokens": 1000, "seconds": 60.0}
    entry |= {"losses": dict.fromkeys(SPLITS, loss)}
    entry |= {"curve": [{"tokens": t, "val": loss + 1000 / t - 1} for t in (250, 500, 750, 1000)]}
    correlations = {f"{name}_correlation": [r, -1, 1] for name in ("mlp", "mlp_here", "block")}
    entry |= {"alignment": {"mlp": profile, "block": profile} | correlations}
    record(entry, folder)


def invent_study(name, effects, folder, **more):
    """Store a study in which some arms differ by `effects` from the others, plus a little noise.

    An effect of None is a difference that changes sign from seed to seed.
    """
    for run in load_study(name).runs:
        effect = effects.get(run.arm, 0.0)
        noise = 0.02 * (-1) ** run.seed if effect is None else 0.001 * (run.seed % 3)
        noise *= run.arm in effects
        invent(run, 6.0 + 0.1 * run.seed + (effect or 0.0) + noise, folder, **more)


def test_without_a_record_nothing_is_claimed(tmp_path, monkeypatch):
    space = show(tmp_path, monkeypatch)
    assert space["text"].startswith("The measurement is not on record yet")
    assert len(space["wanted"]) == 7
    assert space["half"] == space["trends"] == space["gaps"] == space["times"] == {}
    for pair in space["PAIRS"]:
        assert space["outcome"]([], *pair).endswith("not yet run on two seeds.")
    assert space["slopes"] == {}
    assert "not on record" in space["reading"](*space["pairs"])


CASES = {
    "a gain in the right direction": (-0.1, 0.1, "ahead of", "worth more early", "holds", "holds"),
    "a gain of the mirror image too": (-0.1, -0.1, "ahead of", "not told apart", "holds", None),
    "a loss": (0.1, 0.0, "behind", "is behind uniform", "fails", "fails"),
    "nothing": (None, None, "not told apart from", "Neither a gain", "no effect found", None),
}


@pytest.mark.parametrize("case", CASES)
def test_words_and_verdicts_follow_the_cosine_runs(tmp_path, monkeypatch, case):
    cosine, mirrored, word, sentence, gain, direction = CASES[case]
    effects = {"cosine": cosine, "mirrored": mirrored}
    invent_study("taper-cosine", effects, tmp_path, profile=RISING, r=0.8)
    space = show(tmp_path, monkeypatch)
    assert f"**{word}**" in space["outcome"](space["records"]["cosine"], "cosine", "uniform")
    assert sentence in space["reading"](*space["pairs"])
    claims = load_claims()
    assert judge(claims["taper-cosine-gain"], folder=tmp_path).verdict == gain
    if direction:
        assert judge(claims["taper-mirror"], folder=tmp_path).verdict == direction
    assert set(space["slopes"]) == {"uniform", "cosine", "mirrored"}
    words = [space["growth"](slope) for slope in space["slopes"].values()]
    assert all("grows with depth: r = +0.80" in said for said in words)
    assert set(space["trends"]) == {"cosine", "mirrored"}


def test_the_paper_s_differences_outside_of_ours_are_named(tmp_path, monkeypatch):
    invent_study("taper-cosine", {"cosine": -0.12, "linear": -0.12, "sigmoid": None}, tmp_path)
    said = [line for line in show(tmp_path, monkeypatch)["neighbors"] if "paper" in line]
    assert [line.split("`")[1::2] for line in said] == [
        ["linear", "uniform"],
        ["cosine", "linear"],
        ["linear", "sigmoid"],
    ]
    assert "-0.10 nats for `cosine` against `linear`" in said[1]


def test_a_direction_without_growth_of_alignment_is_not_explained_by_it(tmp_path, monkeypatch):
    effects = {"cosine": -0.1, "mirrored": 0.1}
    invent_study("taper-cosine", effects, tmp_path, profile=RISING[::-1], r=-0.8)
    invent_study("taper-architectures", {}, tmp_path, r=0.6)
    verdict = show(tmp_path, monkeypatch)["verdict"]
    assert "mirrored minus uniform is +0.1" in verdict
    assert "alignment falls with depth, so its growth cannot be" in verdict
    assert "It does grow in `transformer-uniform`, `gated-attention-uniform`" in verdict


def test_groups_and_mixers_are_read_from_their_records(tmp_path, monkeypatch):
    invent_study("taper-groups", {"early": -0.1, "late": None}, tmp_path)
    arms = ("transformer", "gated-attention", "titans", "hope-attention")
    invent_study("taper-architectures", {f"{arm}-cosine": -0.1 for arm in arms}, tmp_path)
    space = show(tmp_path, monkeypatch)
    groups, mixers = space["records"]["groups"], space["records"]["architectures"]
    assert "**ahead of**" in space["outcome"](groups, "early", "uniform")
    assert "**not told apart from**" in space["outcome"](groups, "late", "uniform")
    assert all("**ahead of**" in space["outcome"](mixers, *pair) for pair in space["GAINS"])
    claims = load_claims()
    names = ("early-wider", "late-wider", "architectures")
    verdicts = [judge(claims[f"taper-{name}"], folder=tmp_path).verdict for name in names]
    assert verdicts == ["holds", "direction only", "holds"]


def test_one_seed_of_everything_is_shown_and_judged_by_nothing(tmp_path, monkeypatch):
    for name in ("lr", "groups", "sweep", "cosine", "architectures"):
        for run in load_study(f"taper-{name}").runs:
            if run.seed == 0:
                better = run.arm == "sigmoid-1.25" or run.train.lr == rate_of(run)
                invent(run, 6.0 - 0.1 * better, tmp_path)
    space = show(tmp_path, monkeypatch)
    assert len(space["gaps"]) == 15
    assert min(space["gaps"], key=space["gaps"].get) == "sigmoid-1.25"
    assert space["changed"] == space["half"] == space["trends"] == {}
    assert len(space["times"]) == 5


def rate_of(run):
    """The rate that the plans have for the arm of a screening run."""
    plans = [*load_study("taper-groups").runs, *load_study("taper-cosine").runs]
    rates = {planned.arm: planned.train.lr for planned in plans}
    return rates.get(run.arm.rsplit("-lr", 1)[0]) if run.study == "taper-lr" else None


def test_runs_with_another_rate_than_the_best_are_refused(tmp_path, monkeypatch):
    for run in load_study("taper-lr").runs:
        other = run.train.lr != rate_of(run)
        invent(run, 6.0 - other * run.train.lr, tmp_path)
    space = show(tmp_path, monkeypatch)
    assert "`cosine` of `taper-measured`" in space["changed"]
    invent(load_study("taper-groups").runs[0], 5.0, tmp_path)
    with pytest.raises(AssertionError, match="groups"):
        show(tmp_path, monkeypatch)


def test_measured_widths_must_be_those_of_the_rule(tmp_path, monkeypatch):
    invent(load_study("taper-cosine").run("uniform-seed0"), 6.0, tmp_path)
    space = show(tmp_path, monkeypatch)
    assert space["by_rule"] == widths_by_alignment(MIDDLE, 512)
    assert space["plan"]["measured"] != space["by_rule"]
    invent(load_study("taper-measured").run("measured-seed5"), 6.0, tmp_path)
    with pytest.raises(AssertionError, match="without the widths of the rule"):
        show(tmp_path, monkeypatch)


def test_committed_records_beside_the_studies_are_read(tmp_path, monkeypatch):
    for name in ("alignment", "benchmarks", "leviathan-tied"):
        shutil.copytree(paths.results() / name, tmp_path / name)
    space = show(tmp_path, monkeypatch)
    assert len(space["smol"]) == 30
    assert set(space["bench"]) > {"speed_ratio", "mirrored_speed_ratio"}
    assert space["half"]["5 pairs"] == [0.014, 0.023]
