"""Laws of the tapered widths: exact budget, order, ends, multiples, mirror image, errors."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.errors import ConfigError
from lmgeom.taper import SCHEDULES, group_widths, widths

LAYERS = st.integers(2, 64)
COUNTS = st.integers(1, 64)
NAMES = st.sampled_from(sorted(SCHEDULES))


@st.composite
def tapers(draw):
    """Arguments of a legal taper: any depth, multiple, mean and pair of ends with sum 2."""
    multiple = draw(st.integers(1, 256))
    units = draw(st.integers(1, 400))
    top = draw(st.integers(1, 2 * units - 1))
    ratios = {"start": top / units, "end": (2 * units - top) / units}
    return (draw(LAYERS), units * multiple), {
        "schedule": draw(NAMES),
        "multiple": multiple,
        **ratios,
    }


def check(n_layers, width, start, end, schedule, multiple):
    """Every promise of `widths` for one set of arguments."""
    found = widths(n_layers, width, start=start, end=end, schedule=schedule, multiple=multiple)
    assert len(found) == n_layers
    assert all(type(size) is int and size > 0 for size in found)
    assert sum(found) == n_layers * width
    assert found == sorted(found, reverse=start >= end)
    assert math.isclose(found[0], start * width)
    assert math.isclose(found[-1], end * width)
    assert not any(size % multiple for size in found)
    assert {a + b for a, b in zip(found, found[::-1], strict=True)} == {2 * width}
    for layer in range(1, n_layers - 1):
        x = layer / (n_layers - 1)
        f = SCHEDULES[schedule](x if start >= end else 1 - x)
        low, high = sorted((start * width, end * width))
        assert abs(found[layer] - low - (high - low) * f) <= multiple / 2 * (1 + 1e-6)


@given(tapers())
def test_exact_budget_of_any_taper(arguments):
    sizes, options = arguments
    check(*sizes, **options)


def test_exact_budget():
    """The claim's range in full: every depth 2 to 64 with every multiple 1 to 256."""
    draw = random.Random(0)
    for n_layers, multiple in itertools.product(range(2, 65), range(1, 257)):
        units = draw.randrange(1, 200)
        top = draw.randrange(1, 2 * units)
        ends = {"start": top / units, "end": (2 * units - top) / units}
        schedule = draw.choice(sorted(SCHEDULES))
        check(n_layers, units * multiple, **ends, schedule=schedule, multiple=multiple)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_exact_budget_for_every_pair_of_ends(schedule):
    for n_layers in range(2, 65):
        for top in range(1, 64):
            check(n_layers, 512, top / 32, (64 - top) / 32, schedule, 16)


@given(tapers())
def test_mirror_image(arguments):
    sizes, options = arguments
    swapped = options | {"start": options["end"], "end": options["start"]}
    assert widths(*sizes, **swapped) == widths(*sizes, **options)[::-1]


@given(tapers(), st.integers(2, 9))
def test_scaling_width_and_multiple_scales_every_width(arguments, factor):
    (n_layers, width), options = arguments
    larger = widths(
        n_layers, factor * width, **options | {"multiple": factor * options["multiple"]}
    )
    assert larger == [factor * size for size in widths(n_layers, width, **options)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            (24, 2816, 16),
            "4224 4208 4176 4112 4016 3904 3776 3632 3456 3280 3104 2912 "
            "2720 2528 2352 2176 2000 1856 1728 1616 1520 1456 1424 1408",
        ),
        (
            (24, 5632, 16),
            "8448 8416 8336 8208 8032 7824 7552 7248 6928 6576 6208 5824 "
            "5440 5056 4688 4336 4016 3712 3440 3232 3056 2928 2848 2816",
        ),
        ((10, 7680, 64), "11520 11264 10624 9600 8320 7040 5760 4736 4096 3840"),
    ],
)
def test_golden_vectors(arguments, expected):
    n_layers, width, multiple = arguments
    assert widths(n_layers, width, multiple=multiple) == [int(size) for size in expected.split()]


def test_ends_and_budget_hold_at_the_largest_width():
    width = 2**31 - 2**10
    found = widths(9, width)
    assert (found[0], found[-1], sum(found)) == (3 * width // 2, width // 2, 9 * width)


def test_numbers_of_numpy_are_numbers():
    start, end = np.float64(1.5), np.float64(0.5)
    assert widths(8, 64, start=start, end=end) == widths(8, 64)
    assert all(type(size) is int for size in widths(8, 64, start=start, end=end))


def test_uniform_is_a_taper_that_stays():
    for schedule in SCHEDULES:
        assert widths(7, 48, start=1, end=1, schedule=schedule) == [48] * 7


def test_schedules_fall_and_are_their_own_half_turn():
    for f in SCHEDULES.values():
        values = [f(i / 200) for i in range(201)]
        assert values == sorted(values, reverse=True)
        assert max(abs(a + b - 1) for a, b in zip(values, values[::-1], strict=True)) < 1e-15


def test_a_tie_goes_to_the_wider_width_early():
    assert widths(9, 64, schedule="linear") == [96, 96, 80, 80, 64, 48, 48, 32, 32]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 100}, "multiple=16: must divide 100, 150, 50; 10 would"),
        ({"width": 1504, "start": 1.375, "end": 0.625}, "4 would, as any divisor of 188"),
        ({"width": 48}, "12 would"),
        ({"width": 4, "multiple": 256}, "2 would"),
        ({"start": 1.6}, "ratios .1.6, 0.5.: must be .* with the sum 2,"),
        ({"start": 2, "end": 0}, "positive"),
        ({"start": float("nan")}, "positive"),
        ({"start": "1.5"}, "positive"),
        (
            {"start": 1.3333, "end": 0.6667},
            "ratio 1.3333: must give a whole number; 80/64, 48/64 with multiple=16 would",
        ),
        ({"start": 1.9999, "end": 1e-4}, "ratio 1.9999: .*; 112/64, 16/64 with multiple=16 would"),
        ({"start": 10**400}, "sum 2"),
        ({"start": True, "end": True}, "positive floats or integers"),
        ({"start": 1.5 + 2**-31, "width": 2**31 - 2, "multiple": 1}, "sum 2"),
        ({"schedule": "step"}, "cosine, linear, sigmoid"),
        ({"schedule": ["cosine"]}, "cosine, linear, sigmoid"),
        ({"n_layers": 1}, "at least 2"),
        ({"n_layers": True}, "positive integer"),
        ({"width": 64.0}, "positive integer"),
        ({"width": 10**30}, "below 2\\*\\*31"),
        ({"multiple": 0}, "positive integer"),
    ],
)
def test_errors_name_the_value_and_what_is_right(change, words):
    arguments = {"n_layers": 8, "width": 64, "start": 1.5, "end": 0.5} | change
    with pytest.raises(ConfigError, match=words) as caught:
        widths(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("width", "multiple"), [(100, 16), (72, 16), (1500, 16), (30, 16), (2**30, 2**30 - 1)]
)
def test_the_multiple_that_the_error_names_works(width, multiple):
    with pytest.raises(ConfigError, match="would") as caught:
        widths(8, width, multiple=multiple)
    best = int(str(caught.value).split("; ")[1].split()[0])
    assert sum(widths(8, width, multiple=best)) == 8 * width
    common = math.gcd(width // 2, width)
    assert best == max(n for n in (*range(1, 17), common) if common % n == 0 and n <= multiple)


def ratios_that_the_error_names(error):
    """The ratios and the multiple in the end of an error."""
    words = str(error).split("; ")[1].removesuffix(" would")
    fractions, multiple = words.split(" with multiple=")
    pairs = [part.split("/") for part in fractions.split(", ")]
    return [int(a) / int(b) for a, b in pairs], int(multiple)


@given(LAYERS, st.integers(1, 300) | st.integers(1, 2**31 - 1), st.floats(1e-3, 1.999), COUNTS)
def test_the_ends_that_the_error_names_work(n_layers, width, start, multiple):
    try:
        widths(n_layers, width, start=start, end=2 - start, multiple=multiple)
    except ConfigError as error:
        if "ratio " in str(error):
            (start, end), best = ratios_that_the_error_names(error)
            assert width % multiple or best == multiple
            found = widths(n_layers, width, start=start, end=end, multiple=best)
            assert sum(found) == n_layers * width


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"width": 64, "start": 1.9, "end": 0.1}, "112/64, 16/64 with multiple=16 would"),
        ({"width": 15}, "22/15, 8/15 with multiple=1 would"),
        ({"width": 1, "start": 1.9, "end": 0.1}, "1/1, 1/1 with multiple=1 would"),
    ],
)
def test_the_ends_that_the_error_names(arguments, words):
    with pytest.raises(ConfigError, match=words):
        widths(4, **arguments)


# ------------------------------------------------------------------ groups
@given(st.lists(st.floats(1e-3, 9), min_size=1, max_size=9), st.integers(1, 2**31 - 1), COUNTS)
def test_the_ratios_that_the_error_names_work(parts, width, multiple):
    ratios, groups = [len(parts) * part / sum(parts) for part in parts], len(parts)
    try:
        found = group_widths(groups, width, ratios, multiple)
    except ConfigError as error:
        if "ratio " not in str(error):
            return
        ratios, multiple = ratios_that_the_error_names(error)
        found = group_widths(groups, width, ratios, multiple)
    assert sum(found) == groups * width


def test_groups_that_miss_the_budget_by_one_are_refused():
    width = 2**31 - 1
    with pytest.raises(ConfigError, match="with the sum 1000, to keep the total"):
        group_widths(1000, width, [1] * 999 + [1 + 1 / width], multiple=1)
    ratios = [1] * 998 + [1 + 1 / width, 1 - 1 / width]
    assert sum(group_widths(1000, width, ratios, multiple=1)) == 1000 * width


def test_one_wide_group_of_many_is_a_whole_number():
    width = 2**31 - 1
    ratios = [1 / width] * 999 + [1000 - 999 / width]
    assert sum(group_widths(1000, width, ratios, multiple=1)) == 1000 * width


@given(st.integers(1, 20), st.integers(1, 50), st.sampled_from([1, 8, 16]))
def test_groups_have_the_uniform_budget(layers_a_group, units, multiple):
    width = 4 * units * multiple
    for ratios in ((1.5, 1, 0.5), (0.75, 1.5, 0.75), (0.5, 1, 1.5)):
        found = group_widths(3 * layers_a_group, width, ratios, multiple)
        assert sum(found) == 3 * layers_a_group * width
        assert found == [int(r * width) for r in ratios for _ in range(layers_a_group)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 8}, "n_layers=8: must be a multiple of the 3 groups; 9 would"),
        ({"ratios": (1.5, 1, 1)}, "sum 3"),
        ({"ratios": ()}, r"ratios=\(\): must be a sequence"),
        ({"ratios": None}, "ratios=None: must be a sequence"),
        ({"ratios": "abc"}, "must be positive"),
        ({"width": 36}, "9 would"),
        ({"width": 35, "multiple": 1}, "whole number"),
        ({"width": -64}, "positive integer"),
    ],
)
def test_group_errors(change, words):
    with pytest.raises(ConfigError, match=words):
        group_widths(**{"n_layers": 12, "width": 64} | change)
