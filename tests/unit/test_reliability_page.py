"""The page of promises names tests, and they must be there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reliability.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    existing = {
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named - existing == set()


def test_every_promise_has_a_test() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
    promises = [section for section in sections if section[0].isdigit()]
    assert [int(section.split(".")[0]) for section in promises] == list(range(1, 17))
    assert [section.splitlines()[0] for section in promises if "`test_" not in section] == []
