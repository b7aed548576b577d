"""Assembling the sources of the pages, and the steps before it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import PurePosixPath

import pytest

from lmgeom.book import assets, build, pipeline
from lmgeom.book.execute import Workspace
from lmgeom.errors import BookError
from lmgeom.study import claims


def test_unchanged_files_keep_their_time_and_stale_ones_go(tmp_path):
    build._replace(tmp_path, {PurePosixPath("a/x.md"): b"1", PurePosixPath("b/y.md"): b"2"})
    os.utime(tmp_path / "a" / "x.md", (1000, 1000))
    build._replace(tmp_path, {PurePosixPath("a/x.md"): b"1", PurePosixPath("c.md"): b"3"})
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    assert found == ["a", "a/x.md", "c.md"]
    assert (tmp_path / "a" / "x.md").stat().st_mtime == 1000


def test_notebook_outside_the_table_of_contents_is_named(tmp_path):
    (tmp_path / "nbs" / "lev").mkdir(parents=True)
    (tmp_path / "nbs" / "lev" / "01_spline.ipynb").write_text("{}")
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "_toc.yml").write_text("format: jb-book\nroot: index\n")
    with pytest.raises(BookError, match=r"_toc\.yml lacks lev/01_spline"):
        build.assemble(Workspace(tmp_path, "smoke"))


def test_web_assets_come_from_the_pinned_archives(monkeypatch, tmp_path):
    path = tmp_path / "archive.tgz"
    with tarfile.open(path, "w:gz") as file:
        for name in ("package/es5/tex-mml-chtml.js", "package/es5/other.js", "package/LICENSE"):
            info = tarfile.TarInfo(name)
            info.size = 4
            file.addfile(info, io.BytesIO(b"text"))
    monkeypatch.setattr(assets, "archive", lambda package, quiet: path)
    assert assets.web_assets() == {
        PurePosixPath("mathjax/tex-mml-chtml.js"): b"text",
        PurePosixPath("fonts/LICENSE"): b"text",
    }


def test_missing_web_asset_says_what_to_look_at(monkeypatch):
    monkeypatch.setattr(assets, "archive", lambda package, quiet: None)
    with pytest.raises(BookError, match=r"mathjax 3\.2\.2 .* is npm installed"):
        assets.web_assets()


def test_claims_are_judged_again_only_after_a_change(monkeypatch, tmp_path):
    for name in ("lmgeom", "tests", "book"):
        (tmp_path / name).mkdir()
    (tmp_path / "lmgeom" / "a.py").write_text("X = 1\n")
    (tmp_path / "book" / "claims.yaml").write_text("[]\n")
    runs = []
    monkeypatch.setattr(claims, "load_claims", dict)
    monkeypatch.setattr(claims, "check_tests", lambda rows: runs.append(list(rows)) or {})
    pipeline.prepare_claims(tmp_path)
    pipeline.prepare_claims(tmp_path)
    assert len(runs) == 1
    (tmp_path / "lmgeom" / "a.py").write_text("X = 2\n")
    pipeline.prepare_claims(tmp_path)
    assert len(runs) == 2


def test_failed_studies_stop_the_book(monkeypatch, tmp_path):
    monkeypatch.setattr(
        pipeline.subprocess, "run", lambda *a, **k: type("R", (), {"returncode": 1})
    )
    with pytest.raises(BookError, match="records of finished runs are kept"):
        pipeline.run_studies(tmp_path, 2)
