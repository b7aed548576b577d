"""The words about papers come from the ledger, and their commands exist."""

from pathlib import Path

import pytest

from lmgeom.book.summary import LEAD, PAPERS, command, found, front_table, rerun
from lmgeom.study import judge, load_claims

ROOT = Path(__file__).parents[2]


def test_leading_claims_are_of_their_part():
    claims = load_claims()
    assert LEAD.keys() == PAPERS.keys() == {claim["part"] for claim in claims.values()}
    for part, names in LEAD.items():
        assert {claims[name]["part"] for name in names} == {part}


def test_every_answer_has_a_command_that_exists():
    for claim in load_claims().values():
        if claim.keys() & {"rule", "test", "benchmark"}:
            words = command(claim).split()
            if words[:2] == ["lmgeom", "study"] and words[2] == "run":
                assert (ROOT / "book" / "studies" / f"{words[3]}.yaml").is_file()
            elif words[:2] == ["python", "-m"]:
                assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), claim["id"]
            else:
                assert words == ["lmgeom", "study", "claims", "--check"]


@pytest.mark.parametrize("part", PAPERS)
def test_a_part_says_all_its_counts_and_studies(part):
    claims = [claim for claim in load_claims().values() if claim["part"] == part]
    assert f"{len(claims)} claims (" in found(part)
    commands = rerun(part)
    assert all(f"`{command(claim)}`" in commands for claim in claims if "rule" in claim)


def test_the_front_table_has_the_verdicts_of_the_ledger():
    rows = front_table().splitlines()
    claims = load_claims()
    for names in LEAD.values():
        for name in names:
            row = next(row for row in rows if claims[name]["claim"] in row)
            assert f"**{judge(claims[name]).verdict}**" in row
            assert row.count("|") == 4
