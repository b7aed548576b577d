"""Reading times and the short path."""

from pathlib import Path

import pytest

from lmgeom.book.build import chapters
from lmgeom.book.reading import WORDS_A_MINUTE, reading_page, short_path, words
from lmgeom.errors import BookError

ROOT = Path(__file__).parents[2]
PAGE = """# A title of five words

Some text with `code`, a [link](elsewhere) and $x + y$.

```python
not_counted = 1
```

## Part

one two three

### Deeper

four

## Next

five
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def test_words_of_a_section_end_with_its_level(root):
    assert words(root, "page", "Part") == 3 + 1  # its own text and that below its subheading
    assert words(root, "page", "Next") == 1


def test_code_blocks_and_formulas_are_no_words(root):
    prose = "A title of five words Some text with code a link and Part one two three Deeper four"
    assert words(root, "page") == len([*prose.split(), "Next", "five"])


def test_a_page_or_section_that_is_not_there_is_refused(root):
    with pytest.raises(BookError, match="no page 'nothing'"):
        words(root, "nothing")
    with pytest.raises(BookError, match="no section 'Last'; it has: A title of five words, Part"):
        words(root, "page", "Last")


def test_the_short_path_leaves_time_for_pictures():
    """Seven of the ten minutes at most are words, on pages that the book has."""
    stops = short_path(ROOT)
    known = chapters(ROOT / "book" / "_toc.yml")
    assert all(stop.page in known for stop in stops)
    total = sum(words(ROOT, stop.page, stop.section) for stop in stops) / WORDS_A_MINUTE
    assert 4 < total <= 7
    assert f"| **{total:.1f}** | **in all** |" in reading_page(ROOT)


def test_every_chapter_has_its_time():
    text = reading_page(ROOT)
    for page in chapters(ROOT / "book" / "_toc.yml"):
        if (ROOT / "nbs" / f"{page}.ipynb").is_file():
            assert f"[](/{page}.ipynb) (" in text
