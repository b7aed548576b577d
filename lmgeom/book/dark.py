"""Draw heat maps a second time, for pages in dark mode.

In dark mode the pages turn the lightness of drawings around (see book/_static/lmgeom.css): black
text becomes light. Where color stands for a number that would turn the scale around, too. Such a
drawing gets a twin in which all is turned but the field of colors and what is drawn on it.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from lmgeom.errors import BookError

__all__ = ["dark_twin", "draw_for_dark"]

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
FIELD = re.compile(r"QuadMesh|QuadContourSet")  # Matplotlib's names of fields drawn as shapes
ON_FIELD = re.compile(r"line2d|PathCollection")  # and of what may be drawn on a field
COLOR = re.compile(r"((?:fill|stroke): ?)(#[0-9a-f]{6})\b")
IMAGE = re.compile(r'<img (alt="[^"]*") (src="([^"]*_images/[^"/]*)\.svg")([^>]*)>')
IMAGE_TAG = f"{{{SVG}}}image"
# The filter of the style sheet: invert(0.94) hue-rotate(180deg) brightness(1.25).
INVERT, BRIGHTEN, LUMINANCE = 0.94, 1.25, (0.213, 0.715, 0.072)


def turned(color: str) -> str:
    """Turn the lightness of a color around and keep its hue, as the style sheet's filter does."""
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    values = [INVERT + (1 - 2 * INVERT) * value for value in values]
    gray = sum(weight * value for weight, value in zip(LUMINANCE, values, strict=True))
    values = [min(max(2 * gray - value, 0), 1) * BRIGHTEN for value in values]
    return "#" + "".join(f"{min(round(255 * value), 255):02x}" for value in values)


def _turn(element: ET.Element) -> None:
    """Turn the colors of one element."""
    if style := element.get("style"):
        element.set("style", COLOR.sub(lambda match: match[1] + turned(match[2]), style))


def _is_field(element: ET.Element) -> bool:
    """Tell whether an element is a field of colors: an image, perhaps in a frame, or shapes."""
    if name := element.get("id", ""):
        return element.tag == IMAGE_TAG or FIELD.match(name) is not None
    return any(part.tag == IMAGE_TAG for part in (element, *element))


def _walk(element: ET.Element) -> None:
    """Turn an element and what is in it; on a field of colors, lines and dots stay as they are."""
    _turn(element)
    on_field = any(_is_field(child) for child in element)
    for child in element:
        if not (_is_field(child) or (on_field and ON_FIELD.match(child.get("id", "")))):
            _walk(child)


def dark_twin(svg: str) -> str | None:
    """Drawing for dark mode, or None where the style sheet's filter is all that is needed.

    Args:
        svg: A drawing of Matplotlib.

    Raises:
        BookError: The text is no SVG.
    """
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    try:
        root = ET.fromstring(svg)
    except ET.ParseError as error:
        raise BookError(f"a drawing is no SVG: {error}") from None
    if not any(_is_field(element) for element in root.iter()):
        return None
    root.set("style", f"fill: {turned('#000000')}")  # Matplotlib leaves black fills unsaid
    for child in root:
        _walk(child)
    return ET.tostring(root, encoding="unicode")


def draw_for_dark(html: Path) -> list[Path]:
    """Write the twins of a built book's heat maps, and let pages in dark mode show them.

    Args:
        html: Folder of the built pages.

    Returns:
        The drawings written, by name.
    """
    twins: dict[Path, bool] = {}

    def twin(match: re.Match[str], page: Path) -> str:
        alt, source, stem, rest = match.groups()
        path = (page.parent / f"{stem}-dark.svg").resolve()
        if path not in twins:
            text = dark_twin(path.with_name(f"{Path(stem).name}.svg").read_text(encoding="utf-8"))
            twins[path] = text is not None
            if text is not None:
                path.write_text(text, encoding="utf-8")
        if not twins[path]:
            return match[0]
        light = f'<img class="only-light" {alt} {source}{rest}>'
        return f'{light}<img class="only-dark" {alt} src="{stem}-dark.svg"{rest}>'

    for page in sorted(html.rglob("*.html")):
        old = page.read_text(encoding="utf-8")
        new = IMAGE.sub(lambda match, page=page: twin(match, page), old)  # type: ignore[misc]
        if new != old:
            page.write_text(new, encoding="utf-8")
    return sorted(path for path, written in twins.items() if written)
