"""Assembling the sources of the pages, and the steps before it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import PurePosixPath
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from lmgeom.book import assets, build, pipeline
from lmgeom.book.execute import Workspace
from lmgeom.errors import BookError, ConfigError
from lmgeom.study import claims, run


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


def test_gpu_profile_is_refused_without_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "settings.ini").write_text("[gpu]\nworkers = 1\ntimeout = 60\ntokenizers = []\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(pipeline, "prepare_data", lambda profile: pytest.fail("began"))
    with pytest.raises(ConfigError, match=r"needs a CUDA device .*; take profile book"):
        pipeline.make_book(tmp_path, "gpu")


def test_plan_says_what_is_lacking_and_does_nothing(monkeypatch, tmp_path):
    general = "workers = 3\ntimeout = 60\ntokenizers = ['bpe-16k']\n"
    (tmp_path / "settings.ini").write_text(f"[book]\n{general}part/01_one.seed = 2\n")
    (tmp_path / "nbs" / "part").mkdir(parents=True)
    (tmp_path / "lmgeom").mkdir()
    cell = new_code_cell("seed = 0", id="seed", metadata={"tags": ["parameters"]})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "nbs" / "part" / "01_one.ipynb")
    monkeypatch.setattr(claims, "load_claims", dict)
    study = run.Study("s", "?", tmp_path, (SimpleNamespace(path=lambda: tmp_path / "none.json"),))
    monkeypatch.setattr(run, "studies", lambda: ["s"])
    monkeypatch.setattr(run, "load_study", lambda name: study)
    monkeypatch.setattr(run, "time_left", lambda study, workers: 7200.0)
    lines = pipeline.plan(tmp_path, "book")
    assert lines[0] == "data: minipile-core, prepared for bpe-16k; read from the cache"
    assert "0 of 1 runs are on record" in lines[1]
    assert lines[1].endswith("1 to run, 3 at a time, about 2.0 h like ours")
    assert lines[2] == "  s: 1 of 1 runs, about 2.0 h"
    assert "  part/01_one, with seed = 2" in lines
    assert not list(tmp_path.rglob("executed/**/*.ipynb"))
