"""The taper studies: every arm has the uniform budget and the widths that its name promises."""

from dataclasses import replace

import pytest

from lmgeom.lm import parameters, presets
from lmgeom.study import load_claims, load_records
from lmgeom.study.run import load_study
from lmgeom.taper import SCHEDULES, group_widths, widths, widths_by_alignment

SHAPE = presets["transformer-small"]
SIZE = (SHAPE.layers, SHAPE.mlp_width)
NAMED = {
    "uniform": list(SHAPE.widths),
    "cosine": widths(*SIZE),
    "mirrored": widths(*SIZE, start=0.5, end=1.5),
    "linear": widths(*SIZE, schedule="linear"),
    "sigmoid": widths(*SIZE, schedule="sigmoid"),
    "early": group_widths(*SIZE, (1.5, 1, 0.5)),
    "middle": group_widths(*SIZE, (0.75, 1.5, 0.75)),
    "late": group_widths(*SIZE, (0.5, 1, 1.5)),
}
MIXERS = {
    "transformer": ("attention", {}),
    "gated-attention": ("gated-attention", {}),
    "titans": ("titans-lmm", {"depth": 1}),
    "hope-attention": ("hope-attention", {"levels": 4}),
}
SCREENED = ("uniform", "cosine", "mirrored", "early", "middle", "late")
TAPERS = ("uniform", "cosine", "mirrored")
STUDIES = {
    "taper-lr": {f"{arm}-lr{lr}" for arm in SCREENED for lr in (1, 2, 4)},
    "taper-groups": {"uniform", "early", "middle", "late"},
    "taper-cosine": {"uniform", "cosine", "mirrored", "linear", "sigmoid"},
    "taper-sweep": {"uniform"}
    | {f"{name}-{start:g}" for name in SCHEDULES for start in (1.25, 1.375, 1.5, 1.625, 1.75)},
    "taper-ratio": {f"cosine-{start:g}" for start in (1.25, 1.375, 1.5, 1.625)} | {"linear-1.5"},
    "taper-architectures": {f"{mixer}-{arm}" for mixer in MIXERS for arm in TAPERS}
    - {"transformer-mirrored"},
    "taper-measured": {"cosine", "measured"},
}


def measured():
    """Widths by the rule of taper-measured; uniform ones before their source is on record."""
    for r in load_records("taper-cosine"):
        if (r["arm"], r["seed"]) == ("uniform", 0):
            return widths_by_alignment(r["alignment"]["mlp"], SHAPE.mlp_width)
    return list(SHAPE.widths)


def promised(arm):
    """Widths that the name of an arm stands for."""
    first, _, last = arm.rpartition("-")
    if arm == "measured":
        return measured()
    if last in NAMED or last.startswith("lr"):
        return NAMED[last if last in NAMED else first]
    return widths(*SIZE, start=float(last), end=2 - float(last), schedule=first)


@pytest.mark.parametrize("name", STUDIES)
def test_arms_are_what_their_names_say(name):
    study = load_study(name)
    assert {run.arm for run in study.runs} == STUDIES[name]
    for run in study.runs:
        mixer = run.arm.rpartition("-")[0] if name == "taper-architectures" else "transformer"
        assert (run.model.mixer, run.model.mixer_options) == MIXERS[mixer]
        assert list(run.model.widths) == promised(run.arm), run.arm
        uniform = replace(SHAPE, mixer=run.model.mixer, mixer_options=run.model.mixer_options)
        assert parameters(run.model) == parameters(uniform)


@pytest.mark.parametrize("name", STUDIES)
def test_arms_differ_in_widths_and_learning_rate_alone(name):
    runs = load_study(name).runs
    assert len({str(run.train.to_dict() | {"seed": 0, "lr": 0}) for run in runs}) == 1
    assert len({str(run.evaluation) + str(run.data) for run in runs}) == 1


def test_no_seed_both_chooses_widths_and_judges_them():
    chosen, judged = (
        {r.seed for r in load_study(f"taper-{s}").runs} for s in ("cosine", "measured")
    )
    assert not chosen & judged
    rates = {
        name: {r.train.lr for r in load_study(f"taper-{name}").runs if r.arm == "cosine"}
        for name in ("cosine", "measured")
    }
    assert rates["cosine"] == rates["measured"]


def test_the_screening_chooses_what_other_seeds_judge():
    screened, judged = (load_study(f"taper-{name}").runs for name in ("sweep", "ratio"))
    assert not {run.seed for run in screened} & {run.seed for run in judged}
    once = {r["arm"]: r["losses"]["val"] for r in load_records("taper-sweep")}
    by_schedule = {
        name: sorted((arm for arm in once if arm.startswith(name)), key=once.__getitem__)
        for name in ("cosine", "linear")
    }
    assert len(by_schedule["cosine"]) == len(by_schedule["linear"]) == 5
    rule = load_claims()["taper-schedule-first"]["rule"]
    assert rule["better"] == by_schedule["cosine"][-1]
    assert rule["than"] == by_schedule["linear"][0]
    same = {run.arm: run.train.to_dict() | {"seed": 0} for run in screened}
    assert all(run.train.to_dict() | {"seed": 0} == same[run.arm] for run in judged)
