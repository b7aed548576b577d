import json
import multiprocessing
import os
import socket
import subprocess
import threading
import time

import pytest

from lmgeom.errors import RecordError
from lmgeom.study import records
from lmgeom.study.records import (
    FIELDS,
    HEARTBEAT,
    MISSED,
    dead_writer,
    is_being_written,
    load_record,
    load_records,
    only_writer,
    record,
    run_id,
)


def entry(**changes):
    base = dict.fromkeys(FIELDS, 0) | {"study": "s", "arm": "a", "seed": 1, "losses": {"val": 4.0}}
    return base | {"id": run_id({"seed": 1}), "config": {}, "curve": []} | changes


def test_round_trip(tmp_path):
    path = record(entry(), tmp_path)
    assert load_record(path) == entry()
    assert load_records("s", tmp_path) == [entry()]
    assert os.listdir(tmp_path / "s") == [path.name]


def test_ids_ignore_order_and_see_every_value():
    assert run_id({"a": 1, "b": 2}) == run_id({"b": 2, "a": 1}) != run_id({"a": 1, "b": 3})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(tmp_path, value):
    with pytest.raises(RecordError, match=f"losses val={value} must be a finite number"):
        record(entry(losses={"val": value}), tmp_path)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("losses", [{}, {"wiki_ood": 4.0}])
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": 5}, "study=5 must be a string"),
        ({"study": "../s"}, r"name '\.\./s/a-seed1-\w+\.json' must be short, of letters"),
        ({"study": "s" * 300}, "name 's+/a-seed1.* must be short"),
        ({"arm": "\ud800"}, r"name 's/\\ud800-.* must be short, of letters"),
        ({"id": [1]}, r"id=\[1\] must be a string"),
        ({"seed": True}, "seed=True must be an integer"),
        ({"config": 5}, "config=5 must be a mapping"),
        ({"losses": None}, "losses=None must be a mapping"),
        ({"losses": [4.0]}, r"losses=\[4\.0\] must be a mapping"),
        ({"losses": {"val": "x"}}, "losses val='x' must be a finite number"),
        ({"losses": {"val": None}}, "losses val=None must be a finite number"),
        ({"losses": {"val": 10**400}}, "losses val=10+ must be a finite number"),
        ({"losses": {"val": 1.0, "c4": True}}, "losses c4=True must be a finite number"),
        ({"curve": 5}, "curve=5 must be a list"),
        ({"curve": [5]}, "curve 5 must be a mapping with an integer 'tokens'"),
        ({"curve": [{"val": 1.0}]}, "curve {'val': 1.0} must be a mapping with an integer"),
        ({"curve": [{"tokens": 1.5, "val": 1.0}]}, ".*must be a mapping with an integer 'tokens'"),
        ({"curve": [{"tokens": 1, "val": "x"}]}, "curve val='x' must be a finite number"),
        ({"curve": [{"tokens": 1, "val": None}]}, "curve val=None must be a finite number"),
        ({"curve": [{"tokens": 1, "head/excess": []}]}, r"curve head/excess=\[\] must be"),
        ({"alignment": [1]}, r"alignment=\[1\] must be a mapping"),
        ({"alignment": {"mlp": [1.0]}}, r"alignment mlp must be config\.model\.layers finite"),
        ({"alignment": {"mlp_correlation": 5}}, "alignment mlp_correlation must be 3 finite"),
        ({"config": {"model": 5}, "alignment": {"mlp": [1.0]}}, "alignment mlp must be config"),
        ({"config": {"model": {"layers": 1}}, "alignment": {"mlp": ["x"]}}, ".*must be 1 finite"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, changes, message):
    path = tmp_path / "a-seed1-x.json"
    path.write_text(json.dumps(entry(**changes)))
    with pytest.raises(RecordError, match=f"record a-seed1-x.json: {message}") as error:
        load_record(path)
    assert "\n" not in str(error.value)


def test_a_head_may_have_no_excess(tmp_path):
    record(entry(curve=[{"tokens": 1, "val": 4, "head/excess": None}]), tmp_path)
    assert load_records("s", tmp_path)[0]["curve"][0]["head/excess"] is None


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
    assert dead_writer(path) == f"process {child.pid} on {socket.gethostname()}"
    with only_writer(path):
        assert is_being_written(path)
        assert not dead_writer(path)
    assert not list(tmp_path.iterdir())


def ended():
    """The number of a process that ran and ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


HERE, LATE = f"on {socket.gethostname()}", MISSED * HEARTBEAT + 5


@pytest.mark.parametrize(
    ("text", "age", "live"),
    [
        ("process 1 on elsewhere", 0, True),
        ("process 1 on elsewhere", LATE, False),
        (f"process {ended()} {HERE}", 0, False),
        (f"process {os.getpid()} {HERE}", LATE, True),
        (f"process {os.getpid()} {HERE}\nborn 1", 0, False),
        (f"process {os.getpid()} {HERE}\nmachine another-boot", 0, True),
        (f"process {os.getpid()} {HERE}\nmachine another-boot", LATE, False),
        (f"process 99999999999999999999 {HERE}", 0, True),
        ("", 0, True),
        ("", LATE, False),
        ("no owner at all\x00", LATE, False),
    ],
)
def test_which_locks_are_stale(tmp_path, text, age, live):
    """On the owner's machine its process decides, elsewhere the age of the lock."""
    path, lock = tmp_path / "run.json", tmp_path / "run.lock"
    lock.write_text(text)
    os.utime(lock, (0, time.time() - age))
    assert is_being_written(path) is live
    if live:
        with pytest.raises(RecordError, match="is being written by"), only_writer(path):
            pass
        assert lock.read_text() == text
    else:
        with only_writer(path):
            assert f"process {os.getpid()} {HERE}" in lock.read_text()
        assert not list(tmp_path.iterdir())


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "HEARTBEAT", 0.01)
    lock = tmp_path / "run.lock"
    with only_writer(tmp_path / "run.json"):
        os.utime(lock, (0, 0))
        deadline = time.monotonic() + 10
        while lock.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - lock.stat().st_mtime < 5
        lock.write_text("process 1 on elsewhere")  # as if it had been taken over
    assert lock.read_text() == "process 1 on elsewhere"


def test_one_of_many_takes_a_stale_lock_over(tmp_path):
    for k in range(30):
        lock, start = tmp_path / f"{k}.lock", threading.Barrier(8)
        lock.write_text(f"process {ended()} {HERE}")
        won = []

        def claim(lock=lock, start=start, won=won):
            start.wait()
            won.append(records._claim(lock))

        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [text for text in won if text] == [lock.read_text()]
        assert list(tmp_path.iterdir()) == [lock]
        lock.unlink()
