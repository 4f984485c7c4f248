"""What the documents cite exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])


@pytest.fixture(scope="module")
def tests() -> set[str]:
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_a_document_names_exist(document: Path, tests: set[str]) -> None:
    assert set(re.findall(r"`(test_\w+)`", document.read_text())) <= tests


def test_mutants_that_the_protocol_names_exist() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    named = [name.strip() for group in re.findall(r"mutants?: ([^|…]+?) \|", text) for name in group.split(",")]
    assert len(named) > 8
    assert set(named) <= {mutant.name for mutant in MUTANTS}
    assert f"**{len(MUTANTS)} mutants**" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_links_to_exist(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in link:
            assert (document.parent / link).exists(), link
