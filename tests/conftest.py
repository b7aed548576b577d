"""What every test file may use."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# A busy machine is no fault of the code, so no example is too slow; CI always draws the same.
patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("book", **patient)
hypothesis.settings.register_profile("ci", **patient, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "book")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout that the tests run in."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def chromium() -> None:
    """A browser: without one, tests of pages are skipped on a laptop and fail in CI."""
    from lmgeom.book.chromium import HOW_TO_GET, find_chromium

    if find_chromium() is None:
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(HOW_TO_GET)
        pytest.skip(HOW_TO_GET)
