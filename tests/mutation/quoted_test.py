"""Every mutation still fits the file that it edits."""

import pathlib

import pytest

from tests.mutation import mutations

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted({row.file for row in mutations.MUTATIONS}))
def test_what_a_mutation_replaces_stands_in_its_file_once(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for mutation in mutations.MUTATIONS:
        if mutation.file == file:
            assert mutation.apply(text) != text
