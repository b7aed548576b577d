"""The settings: exact budgets, exact round trips, and refusals that name what is wrong."""

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lmgeom.errors import ConfigError
from lmgeom.lm import INPUTS, Config, LanguageModel, parameters, presets
from lmgeom.lm.config import ARMS, Presets, arms
from lmgeom.lm.optim import DECAYED, role

SMALL = Config(vocab_size=100, dim=16, layers=2, heads=2, context=8, mlp_width=24)
LEV = replace(SMALL, input="lev", head="untied")
SIZES = ("1.2b", "400m", "200m", "small")


@st.composite
def configs(draw):
    """Small legal configs of every kind."""
    small = st.integers(1, 6)
    layers, heads = draw(small), draw(st.integers(1, 4))
    widths = st.lists(small, min_size=layers, max_size=layers)
    lev = {"seed_dim": draw(small), "rank": draw(small), "n_digits": draw(st.integers(1, 4))}
    options = {
        "table": {},
        "factorized": {"rank": draw(small)},
        "flat-mlp": {"code_dim": draw(small), "inner": draw(small)},
        "factored-mlp": {"seed_dim": draw(small), "inner": draw(small)},
        "lev": lev,
        "lev-permuted": lev | {"permutation_seed": draw(st.integers(0, 9))},
    }
    kind = draw(st.sampled_from(sorted(INPUTS)))
    positive = st.floats(1e-8, 1e8)
    return Config(
        vocab_size=draw(st.integers(1, 400)),
        dim=2 * heads * draw(st.integers(1, 4)),
        layers=layers,
        heads=heads,
        context=draw(st.integers(1, 9)),
        mlp_width=draw(st.one_of(small, widths, widths.map(tuple))),
        input=kind,
        input_options=options[kind],
        head=draw(st.sampled_from(["tied", "untied"] if kind == "table" else ["untied"])),
        rope_base=draw(positive),
        norm_eps=draw(positive),
        init_std=draw(positive),
    )


def hollow(config):
    with torch.device("meta"):
        return LanguageModel(config)


def count(config):
    return sum(w.numel() for w in hollow(config).parameters())


@settings(deadline=None, max_examples=60)
@given(configs())
def test_formula_counts_the_model(config):
    budget = parameters(config)
    assert budget.total == count(config)
    assert budget.tied_total == count(replace(config, input="table", input_options={}, head="tied"))


@settings(deadline=None, max_examples=60)
@given(configs())
def test_round_trips_are_exact(config):
    for back in (
        Config.from_json(config.to_json()),
        Config.from_dict(config.to_dict()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert back == config
        assert hash(back) == hash(config)
        assert repr(back) == repr(config)


@pytest.mark.parametrize("name", presets)
def test_presets_count_what_they_build(name):
    assert parameters(presets[name]).total == count(presets[name])


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("tied-1.2b", 1_215_727_616),
        ("untied-400m", 611_722_240),
        ("tied-400m", 406_537_216),
        ("tied-200m", 206_899_840),
        ("leviathan-1.2b", 1_215_727_616 + 2_252_928),
        ("leviathan-small", 3_146_880 + 169_344),
    ],
)
def test_totals(name, total):
    assert parameters(presets[name]).total == total


def test_leviathan_share():
    budget = parameters(presets["leviathan-1.2b"])
    assert budget.input == 2_252_928
    assert budget.total - budget.tied_total == budget.input
    assert 15 * budget.tied_total < 10_000 * budget.input < 25 * budget.tied_total
    assert round(budget.overhead, 5) == 0.00185


def test_untied_count():
    total = parameters(presets["untied-400m"]).total
    assert 611_000_000 <= total <= 612_000_000
    assert total == count(presets["untied-400m"])


@pytest.mark.parametrize("size", SIZES)
def test_every_arm_has_one_shape_and_levs_price(size):
    configs = {arm: presets[f"{arm}-{size}"] for arm in ARMS}
    shapes = {
        replace(config, input="table", input_options={}, head="tied") for config in configs.values()
    }
    assert shapes == {configs["tied"]}
    assert all(config.head == "untied" for arm, config in configs.items() if arm != "tied")
    cost = {arm: parameters(config).input for arm, config in configs.items()}
    for arm in ("flat", "factored"):
        assert abs(1000 * (cost[arm] - cost["leviathan"])) <= 5 * cost["leviathan"]
    one_rank = configs["albert"].vocab_size + configs["albert"].dim
    assert 2 * abs(cost["albert"] - cost["leviathan"]) <= one_rank
    assert cost["albert-wide"] > 5 * cost["albert"]
    assert 10 * cost["leviathan"] <= cost["tied"], "as in the paper, a small part of the table"


def test_the_overhead_falls_with_scale():
    budgets = [parameters(presets[f"leviathan-{size}"]) for size in ("200m", "400m", "1.2b")]
    wider = [
        replace(presets["leviathan-1.2b"], dim=2**n, mlp_width=2 ** (n + 2)) for n in range(6, 21)
    ]
    for series in (budgets, [parameters(config) for config in wider]):
        for a, b in itertools.pairwise(series):
            assert a.input * b.tied_total > b.input * a.tied_total
            assert (a.total - a.tied_total, b.total - b.tied_total) == (a.input, b.input)


def test_the_small_size_has_two_more_arms():
    small, default = presets["leviathan-small"], presets["leviathan-small-default"]
    assert parameters(small).input == 169_344
    assert parameters(default).input == 1_257_216
    permuted = presets["leviathan-small-permuted"]
    assert parameters(permuted) == parameters(small)
    assert permuted.input_options == small.input_options
    assert {permuted.input, small.input} == {"lev-permuted", "lev"}


@pytest.mark.parametrize("arm", [*(f"{arm}-small" for arm in ARMS), "leviathan-small-permuted"])
def test_what_decays(arm):
    """Tables, codes and matrices decay; splines, gains and biases do not."""
    roles = {
        name.rpartition(".")[2]: role(name, tuple(weight.shape))
        for name, weight in hollow(presets[arm]).named_parameters()
        if name.startswith("input.")
    }
    known = {"weight": "embedding", "codebooks": "embedding", "spline_delta": "spline"}
    known |= dict.fromkeys(("hidden", "output", "projection"), "matrix")
    known |= dict.fromkeys(("bias", "norm_gain", "norm_bias"), "gain")
    assert roles == {name: known[name] for name in roles}
    assert all(DECAYED[kind] == (kind not in ("spline", "gain")) for kind in roles.values())


def test_the_permuted_model_is_the_other_one_with_new_names():
    models = []
    for name in ("leviathan-small", "leviathan-small-permuted"):
        torch.manual_seed(4)
        models.append(LanguageModel(presets[name]))
    plain, permuted = models
    ids = torch.randint(16_384, (2, 20))
    with torch.no_grad():
        renamed = plain.hidden(permuted.input.order[ids])
        assert torch.allclose(permuted.hidden(ids), renamed, atol=1e-5)
    assert torch.equal(plain.head.weight, permuted.head.weight)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, head="untied"),
        replace(SMALL, mlp_width=(40, 8)),
        presets["untied-1.2b"],
    ],
)
def test_flops_agree_with_the_counter(config):
    model = hollow(config)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(torch.empty(2, config.context, dtype=torch.int64))
    assert counter.get_total_flops() == 2 * config.context * parameters(config).flops


@pytest.mark.parametrize("name", ["lev", "lev-permuted"])
def test_lev_executes_at_most_its_flops(name):
    config = replace(LEV, input=name)
    model = LanguageModel(config)
    ids = torch.arange(40).view(5, 8)
    with FlopCounterMode(display=False) as counter:
        model.input(ids)
    assert 0 < counter.get_total_flops() <= 40 * parameters(config).input_flops


@pytest.mark.parametrize("arm", ["tied", "albert", "flat", "factored"])
def test_its_rivals_execute_exactly_their_flops(arm):
    config = presets[f"{arm}-small"]
    model, ids = LanguageModel(config), torch.arange(40).view(5, 8)
    with FlopCounterMode(display=False) as counter:
        model.input(ids)
    assert counter.get_total_flops() == 40 * parameters(config).input_flops


def test_importing_loads_no_compiler():
    code = "import sys, lmgeom.cli, lmgeom.lm; print('torch._dynamo' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (child.stdout, child.stderr) == ("False\n", "")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_params_takes_little_time_and_memory():
    """Processor time, since a busy machine must not decide; measured: 1.7 s and 230 MiB.

    The child reads its own peak: what `getrusage` says of a child starts at its parent's size.
    """
    code = (
        "import time; from lmgeom.cli import main; main(['params', 'leviathan-1.2b']);"
        "peak = open('/proc/self/status').read().partition('VmHWM:')[2].split()[0];"
        "print(time.process_time(), peak)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for word in ("2,252,928", "1,217,980,544", "+0.185%", "2,481,684,480"):
        assert word in child.stdout
    seconds, kilobytes = child.stdout.split()[-2:]
    assert float(seconds) < 5
    assert int(kilobytes) < 1e6


def test_rows_add_up():
    rows = parameters(LEV).rows()
    assert [row[0] for row in rows] == ["input", "body", "norms", "head", "total"]
    assert sum(row[1] for row in rows[:-1]) == rows[-1][1]
    assert sum(row[2] for row in rows[:-1]) == pytest.approx(1)


def test_a_preset_cannot_be_changed_for_others():
    presets["titans-small"].mixer_options["depth"] = 3
    assert presets["titans-small"].mixer_options == {"depth": 1}


def test_a_taper_of_equal_sum_costs_the_same():
    assert parameters(replace(SMALL, mlp_width=(36, 12))) == parameters(SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0: must be a positive integer"),
        ({"dim": True}, "dim=True: must be a positive integer"),
        ({"vocab_size": 10**20}, r"vocab_size=1\d+: must be at most 2\*\*30"),
        ({"context": 2**30 + 1}, r"context=1073741825: must be at most 2\*\*30"),
        (
            {"mixer": "hope-attention", "mixer_options": {"levels": 25}},
            r"mixer_options={'levels': 25}: levels must be at most the narrowest MLP, 24",
        ),
        ({"layers": 2.0}, r"layers=2\.0: must be a positive integer"),
        ({"context": "8"}, "context='8': must be a positive integer"),
        ({"heads": 3}, "heads=3: must divide dim=16"),
        ({"heads": 16}, "head dimension 1: must be even"),
        ({"mlp_width": (24,)}, r"mlp_width=\(24,\): needs one width for each layer: 2, got 1"),
        ({"mlp_width": (24, 0)}, r"mlp_width=\(24, 0\): must be positive integers"),
        ({"mlp_width": False}, "mlp_width=False: must be a positive integer, or one for each"),
        ({"mixer": "conv"}, "mixer='conv': known: attention"),
        (
            {"input": "hash"},
            "input='hash': known: table, factorized, flat-mlp, factored-mlp, lev, lev-permuted",
        ),
        ({"head": None}, "head=None: known: tied, untied"),
        ({"input": "lev"}, "head='tied': input 'lev' has no table; use 'untied'"),
        ({"input_options": {"rank": 2}}, r"input_options=\['rank'\]: unknown for 'table'; known"),
        (
            {"mixer_options": {"context": 2}},
            r"\['context'\]: unknown for 'attention'",
        ),
        ({"mixer_options": None}, "mixer_options=None: must be a dict"),
        ({"rope_base": 10**400}, "rope_base=10+: must be a positive finite number"),
        ({"rope_base": float("nan")}, "rope_base=nan: must be a positive finite number"),
        ({"norm_eps": 0}, "norm_eps=0: must be a positive finite number"),
        ({"init_std": "small"}, "init_std='small': must be a positive finite number"),
    ],
)
def test_impossible_settings_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        replace(SMALL, **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"knots": 8},
            r"\['knots'\]: unknown for 'lev'; known: .*heads, .*n_digits, n_knots, .*rank",
        ),
        ({"n_knots": 2}, "n_knots must be at least 3, got 2"),
        ({"rank": "64"}, "rank must be an integer"),
        ({"heads": (2,)}, "values must be numbers, strings, booleans or lists of them"),
        ({"rank": float("inf")}, "values must be numbers"),
        ({"seed_dim": 2**40}, "overflowed"),
        ({"rank": 2**70}, "unpack"),
    ],
)
def test_impossible_options_are_refused_by_their_owner(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        replace(LEV, input_options=options)
    assert "\n" not in str(caught.value)


def test_options_nested_at_any_depth_are_refused():
    text = json.dumps(LEV.to_dict() | {"input_options": {"rank": "deep"}})
    for depth in range(880, 1000):
        with pytest.raises(ConfigError):
            Config.from_json(text.replace('"deep"', "[" * depth + "]" * depth))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config is not JSON"),
        ("[" * 100_000, "config is not JSON: maximum recursion depth"),
        ("[" * 500 + "]" * 500, "config='list': must be a JSON object"),
        ('{"dims": 3}', r"\['dims'\]: unknown; known keys: vocab_size, dim, "),
        ('{"dim": 3}', r"\['vocab_size', 'layers', .*these keys are missing"),
    ],
)
def test_foreign_json_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_json(text)


def test_keys_of_any_kind_are_named():
    with pytest.raises(ConfigError, match=r"config=\[1, 'zz'\]: unknown; known keys: "):
        Config.from_dict({1: 2, "zz": 3})


def test_unknown_presets_name_the_close_ones():
    right = r"preset='titan-small': unknown, close to titans-small, .*; `lmgeom params` lists all"
    with pytest.raises(ConfigError, match=right) as caught:
        presets["titan-small"]
    assert len(str(caught.value)) < 150
    with pytest.raises(ConfigError, match="preset='x': unknown; `lmgeom params` lists all"):
        presets["x"]
    with pytest.raises(ConfigError, match="preset=7: unknown; "):
        presets[7]
    with pytest.raises(ConfigError, match=r"preset=\['x'\]: unknown; "):
        presets[["x"]]
    assert "titan-small" not in presets
    assert presets.get("titan-small") is None


def test_a_preset_is_made_when_it_is_asked_for_and_once():
    made = []
    named = Presets({name: lambda name=name: made.append(name) or SMALL for name in "ab"})
    assert list(named) == ["a", "b"]
    assert len(named) == 2
    assert "a" in named
    assert repr(named) == "Presets(a, b)"
    assert not made
    assert named["b"] == named["b"] == named.get("b") == SMALL
    assert made == ["b"]


def test_every_arm_has_a_name():
    assert set(arms("x", 100, 16, 2, 2, 8, 24, wide=2)) == {f"{name}-x" for name in ARMS}


def test_a_config_is_frozen_and_owns_its_options():
    options = {"rank": 4}
    config = replace(LEV, input_options=options)
    options["rank"] = 8
    assert config.input_options == {"rank": 4}
    with pytest.raises(FrozenInstanceError):
        config.dim = 8


def test_widths_are_one_for_each_layer():
    assert SMALL.widths == (24, 24)
    assert replace(SMALL, mlp_width=[40, 8]).widths == (40, 8)
    assert replace(SMALL, mlp_width=[40, 8]) == replace(SMALL, mlp_width=(40, 8))
