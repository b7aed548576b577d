import multiprocessing
import os

import pytest

from lmgeom.errors import RecordError
from lmgeom.study.records import (
    FIELDS,
    is_being_written,
    load_record,
    load_records,
    only_writer,
    record,
    run_id,
)


def entry(**changes):
    base = dict.fromkeys(FIELDS, 0) | {"study": "s", "arm": "a", "seed": 1, "losses": {"val": 4.0}}
    return base | {"id": run_id({"seed": 1})} | changes


def test_round_trip(tmp_path):
    path = record(entry(), tmp_path)
    assert load_record(path) == entry()
    assert load_records("s", tmp_path) == [entry()]
    assert os.listdir(tmp_path / "s") == [path.name]


def test_ids_ignore_order_and_see_every_value():
    assert run_id({"a": 1, "b": 2}) == run_id({"b": 2, "a": 1}) != run_id({"a": 1, "b": 3})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(tmp_path, value):
    with pytest.raises(RecordError, match="not finite: val"):
        record(entry(losses={"val": value}), tmp_path)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("losses", [{}, None, [4.0], {"wiki_ood": 4.0}])
def test_a_record_without_validation_loss_is_refused(tmp_path, losses):
    with pytest.raises(RecordError, match="no validation loss"):
        record(entry(losses=losses), tmp_path)
    assert not list(tmp_path.rglob("*.*"))


def test_numbers_of_a_list_stand_on_one_line(tmp_path):
    strata = {"counts": [[1, 2], [3, 4]], "nats": [[-1.5, 2e-07]], "words": ["[\n1,\n2]"], "no": []}
    path = record(entry(strata=strata), tmp_path)
    assert load_record(path)["strata"] == strata
    text = path.read_text()
    assert "[1, 2],\n" in text
    assert "[-1.5, 2e-07]\n" in text


def test_a_missing_field_is_named(tmp_path):
    broken = entry()
    del broken["commit"]
    with pytest.raises(RecordError, match="lacks commit"):
        record(broken, tmp_path)


def test_other_losses_never_replace_a_record(tmp_path):
    path = record(entry(), tmp_path)
    with pytest.raises(RecordError, match="exists already"):
        record(entry(losses={"val": 3.0}), tmp_path)
    assert load_record(path)["losses"] == {"val": 4.0}


@pytest.mark.parametrize("text", ["", "[1]", '{"study": "s"}', "\x00"])
def test_damaged_files_are_named(tmp_path, text):
    path = tmp_path / "a-seed1-x.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"a-seed1-x\.json"):
        load_record(path)


def test_a_renamed_record_is_refused(tmp_path):
    path = record(entry(), tmp_path)
    moved = path.rename(path.with_name("b-seed1-000000000000.json"))
    with pytest.raises(RecordError, match="holds the run"):
        load_record(moved)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match="No space left"):
        record(entry(), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_one_writer(tmp_path):
    path = tmp_path / "run.json"
    first, second = only_writer(path), only_writer(path)
    with first, pytest.raises(RecordError, match=f"process {os.getpid()}"), second:
        pass
    with only_writer(path):
        pass
    assert not list(tmp_path.iterdir())


def hold(path, ready, done):
    with only_writer(path):
        ready.set()
        done.wait(30)


def test_the_right_dies_with_its_process(tmp_path):
    path, context = tmp_path / "run.json", multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=hold, args=(path, ready, done))
    child.start()
    assert ready.wait(60)
    assert is_being_written(path)
    with pytest.raises(RecordError, match=f"process {child.pid}"), only_writer(path):
        pass
    child.kill()
    child.join()
    assert not is_being_written(path)
    with only_writer(path):
        assert is_being_written(path)
