"""The taper studies: every arm has the uniform budget and the widths that its name promises."""

import pytest

from lmgeom.lm import parameters, presets
from lmgeom.study.claims import load_claims
from lmgeom.study.run import load_study
from lmgeom.taper import SCHEDULES, group_widths, widths

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
STUDIES = {
    "taper-lr": {f"{arm}-lr{lr}" for arm in list(NAMED)[:3] + list(NAMED)[5:] for lr in (1, 2, 4)},
    "taper-groups": {"uniform", "early", "middle", "late"},
    "taper-cosine": {"uniform", "cosine", "mirrored", "linear", "sigmoid"},
    "taper-sweep": {"uniform"}
    | {f"{name}-{start:g}" for name in SCHEDULES for start in (1.25, 1.375, 1.5, 1.625, 1.75)},
}


def promised(arm):
    """Widths that the name of an arm stands for."""
    schedule, _, detail = arm.partition("-")
    if detail and not detail.startswith("lr"):
        start = float(detail)
        return widths(*SIZE, start=start, end=2 - start, schedule=schedule)
    return NAMED[schedule]


@pytest.mark.parametrize("name", STUDIES)
def test_arms_are_what_their_names_say(name):
    study = load_study(name)
    assert {run.arm for run in study.runs} == STUDIES[name]
    for run in study.runs:
        assert list(run.model.widths) == promised(run.arm), run.arm
        assert parameters(run.model) == parameters(SHAPE)


@pytest.mark.parametrize("name", STUDIES)
def test_arms_differ_in_widths_and_learning_rate_alone(name):
    runs = load_study(name).runs
    assert len({str(run.train.to_dict() | {"seed": 0, "lr": 0}) for run in runs}) == 1
    assert len({str(run.evaluation) + str(run.data) for run in runs}) == 1


def test_claims_name_arms_that_exist():
    for claim in load_claims().values():
        rule = claim.get("rule", {})
        if rule.get("study") in STUDIES:
            pairs = rule.get("pairs") or [[rule["better"], rule["than"]]]
            assert {arm for pair in pairs for arm in pair} <= STUDIES[rule["study"]], claim["id"]
