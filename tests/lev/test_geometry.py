"""The numbers of a table's geometry against brute force in float64 and at the edges."""

import json

import numpy as np
import pytest
import torch

from lmgeom.lev.geometry import (
    effective_rank,
    participation_ratio,
    probe_ids,
    spectrum,
    table_statistics,
)


def cloud(rows, dim, seed=0, dtype=torch.float32):
    """Random points around a common vector, with directions of different spread."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    points *= torch.linspace(1, 0.1, dim, dtype=torch.float64)
    return (points + 0.5).to(dtype)


def brute_force(table):
    """Spectra, ranks, mean cosine and common share from the definitions, in NumPy."""
    table = table.double().numpy()
    rows = table[np.linalg.norm(table, axis=1) > 0]
    cosines = [
        u @ v / np.linalg.norm(u) / np.linalg.norm(v)
        for i, u in enumerate(rows)
        for v in rows[i + 1 :]
    ]
    result = {
        "anisotropy": np.mean(cosines),
        "common_share": (table.mean(0) ** 2).sum() / (table**2).sum(1).mean(),
    }
    for name, matrix in (("raw", table), ("centered", table - table.mean(0))):
        values = np.zeros(table.shape[1])
        found = np.linalg.svd(matrix, compute_uv=False)
        values[: len(found)] = found / np.linalg.norm(found)
        shares = values[values > 1e-8] ** 2
        rank = np.exp(-(shares * np.log(shares)).sum())
        result[name] = (values, rank, 1 / (shares**2).sum())
    return result


def close(value, expected, rtol=6e-5, atol=1e-6):
    np.testing.assert_allclose(value, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", [(200, 6), (3, 9), (40, 40), (50, 100)])
def test_numbers_against_brute_force(shape):
    table = cloud(*shape)
    table[1] = 0
    found, expected = table_statistics(table), brute_force(table)
    close(found["anisotropy"], expected["anisotropy"])
    close(found["common_share"], expected["common_share"])
    for name in ("raw", "centered"):
        values, rank, ratio = expected[name]
        close(found[name]["singular_values"], values[np.array(found["ranks"]) - 1])
        close(found[name]["effective_rank"], rank)
        close(found[name]["participation_ratio"], ratio)
    norms = np.linalg.norm(table.double().numpy(), axis=1)
    close(found["norm_quantiles"], np.quantile(norms, found["norm_levels"]))
    assert (found["rows"], found["dim"], found["zero_rows"]) == (*shape, 1)


def test_neighbors_against_brute_force():
    table = cloud(300, 8)
    centered = (table - table.double().mean(0)).numpy()
    units = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    cosines = units @ units.T - 2 * np.eye(300)
    found = table_statistics(table)["neighbors"]
    assert [entry["id"] for entry in found] == probe_ids(300)
    for entry in found:
        nearest = np.argsort(-cosines[entry["id"]])[:5]
        assert entry["ids"] == nearest.tolist()
        close(entry["cosines"], cosines[entry["id"], nearest])


def test_blocks_do_not_show():
    table = cloud(20_000, 4)
    whole = table.double().numpy()
    found = table_statistics(table)
    largest = np.linalg.norm(whole, 2)
    close(found["raw"]["singular_values"][0], largest / np.linalg.norm(whole))
    units = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    pairs = 20_000 * 19_999
    close(found["anisotropy"], ((units.sum(0) ** 2).sum() - 20_000) / pairs)
    nearest = found["neighbors"][-1]
    assert max(entry["id"] for entry in found["neighbors"]) > 8192
    centered = whole - whole.mean(0)
    cosines = centered @ centered[nearest["id"]] / np.linalg.norm(centered, axis=1)
    assert nearest["ids"] == np.argsort(-cosines)[1:6].tolist()


def test_known_clouds():
    sphere = table_statistics(torch.eye(4).repeat(5, 1) * 3)
    assert sphere["raw"]["effective_rank"] == sphere["raw"]["participation_ratio"] == 4
    assert sphere["centered"]["effective_rank"] == 3
    assert sphere["raw"]["singular_values"] == [0.5] * 4
    assert sphere["common_share"] == 0.25
    line = table_statistics(torch.tensor([[3.0, 4.0], [-3.0, -4.0]]))
    assert (line["raw"]["effective_rank"], line["anisotropy"]) == (1, -1)
    assert line["norm_quantiles"] == [5.0] * 7


def test_permuted_rows_and_units_change_nothing_but_names_and_norms():
    table = cloud(500, 7)
    found = table_statistics(table)
    shuffled = table_statistics(table[torch.randperm(500)])
    scaled = table_statistics(1000 * table)
    for name in ("raw", "centered", "anisotropy", "common_share"):
        assert shuffled[name] == found[name]
        assert scaled[name] == found[name]
    assert shuffled["norm_quantiles"] == found["norm_quantiles"]
    close(scaled["norm_quantiles"], 1000 * np.array(found["norm_quantiles"]))


EDGES = {
    "zero": torch.zeros(3, 4),
    "one entry": torch.ones(1, 1),
    "one row": torch.rand(1, 5),
    "equal rows": torch.full((7, 3), 0.1),
    "wide": torch.rand(2, 200),
    "huge": torch.rand(3, 3).double() * 1e300,
    "tiny": torch.rand(3, 3).double() * 1e-300,
    "half": torch.rand(9, 3, dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.rand(9, 3)),
}


@pytest.mark.parametrize("table", EDGES.values(), ids=EDGES.keys())
def test_edges_are_defined_and_become_json(table):
    found = table_statistics(table)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(found["ranks"]) == len(found["raw"]["singular_values"]) <= 64
    assert (found["ranks"][0], found["ranks"][-1]) == (1, table.shape[1])


def test_values_at_the_edges():
    assert table_statistics(EDGES["zero"])["raw"]["effective_rank"] == 0
    assert table_statistics(EDGES["zero"])["zero_rows"] == 3
    row = table_statistics(EDGES["one row"])
    assert (row["anisotropy"], row["common_share"]) == (0, 1)
    assert row["neighbors"] == [{"id": 0, "ids": [], "cosines": []}]
    equal = table_statistics(EDGES["equal rows"])
    assert equal["centered"]["effective_rank"] == 0
    assert equal["neighbors"][0]["cosines"] == [0] * 5
    assert equal["neighbors"][0]["ids"] == [1, 2, 3, 4, 5]


def test_the_table_is_left_alone():
    table = torch.nn.Parameter(cloud(30, 4))
    before = table.detach().clone()
    table_statistics(table)
    assert torch.equal(table, before)
    assert table.grad is None


@pytest.mark.parametrize("vocab_size", [1, 5, 11, 12, 500, 16_384, 200_376])
def test_probe_ids(vocab_size):
    found = probe_ids(vocab_size)
    assert found == sorted(set(found))
    assert 0 <= found[0] <= found[-1] < vocab_size
    assert len(found) == 12 or vocab_size < 500


def test_ranks_of_known_spectra():
    assert effective_rank(torch.ones(8)) == pytest.approx(8)
    assert effective_rank(torch.tensor([5.0, 0.0])) == 1
    values = torch.rand(20) + 0.01
    assert 1 <= participation_ratio(values) <= effective_rank(values) <= 20
    assert participation_ratio(torch.tensor([3.0, 3.0, 0.0])) == pytest.approx(2)
    assert spectrum(torch.diag(torch.tensor([9.0, 16.0]).double())).tolist() == [0.8, 0.6]


@pytest.mark.parametrize("bad", [torch.ones(3, 3, dtype=torch.int64), [[1.0]], None])
def test_tables_that_are_no_floats(bad):
    with pytest.raises(TypeError, match="table must be a floating-point tensor, got"):
        table_statistics(bad)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (), (0, 3), (3, 0)])
def test_shapes_that_are_no_tables(shape):
    with pytest.raises(ValueError, match=r"table must have shape \(V, D\)"):
        table_statistics(torch.ones(shape))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(bad):
    table = torch.ones(20, 3)
    table[13, 1] = bad
    with pytest.raises(ValueError, match="table must be finite, its largest magnitude is"):
        table_statistics(table)
