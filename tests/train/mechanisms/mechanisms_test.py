"""The table of mechanisms: all is as declared, and docs/mechanisms.md is current."""

import dataclasses

import numpy as np
import pytest
from absl import flags

from models import mixers
from train import audit, cli
from train.mechanisms import costs, page, properties, table

SUBJECTS = table.SUBJECTS
NAMES = tuple(SUBJECTS)
PAGE = page.DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_as_declared_and_as_documented(name):
    """Every property is tried, what must fail too; the costs are counted anew."""
    cells = properties.examine(name)
    assert not {k: cell for k, cell in cells.items() if cell.contradiction}
    row = page.row(name, cells, costs.costs(name))
    assert row in PAGE.splitlines()


def test_the_page_has_these_rows_and_no_others():
    # The legend, of two cells, names some columns as rows are named.
    rows = {x.split(" | ")[0][2:]: x for x in PAGE.splitlines() if x.count(" | ") > 2}
    del rows["mechanism"], rows["---"]
    assert tuple(rows) == NAMES
    assert page.page(rows) == PAGE


def test_every_mixer_and_every_property_is_declared():
    assert set(mixers.MIXERS) <= set(NAMES)
    for name in NAMES:
        assert set(properties.declared(name)) == set(properties.PROPERTIES)


@pytest.mark.parametrize(
    ("holds", "must_fail"), [({"casual"}, set()), ({"causal"}, {"causal"})]
)
def test_a_row_names_known_properties_once(holds, must_fail, monkeypatch):
    false = SUBJECTS["zero"]._replace(holds=holds, must_fail=must_fail)
    monkeypatch.setattr(table, "SUBJECTS", {"zero": false})
    with pytest.raises(ValueError, match="one of causal, padding, .* stands once, got"):
        properties.declared("zero")


@pytest.mark.parametrize(
    "label", ["causal", "padding", "batch", "permutation", "hull", "softmax", "loop"]
)
def test_a_false_declaration_is_contradicted(label, monkeypatch):
    """Of linear attention, or of another that has the property."""
    name = "linear, both ways"
    was = properties.declared(name)[label]
    holds, must_fail = (set(), {label}) if was == properties.HOLDS else ({label}, set())
    false = {name: SUBJECTS[name]._replace(holds=holds, must_fail=must_fail)}
    monkeypatch.setattr(table, "SUBJECTS", false)
    cells = properties.examine(name)
    assert cells[label].contradiction
    broken = page.row(name, cells, costs.Costs(0, None, None, None))
    assert broken.count("BROKEN") == 1


@pytest.mark.parametrize(("name", "label"), [("zero", "hull"), ("rwkv", "softmax")])
def test_what_is_missing_does_not_fail(name, label, monkeypatch):
    """'Must fail' is said of something that was tried."""
    false = {name: SUBJECTS[name]._replace(holds=set(), must_fail={label})}
    monkeypatch.setattr(table, "SUBJECTS", false)
    with pytest.raises(ValueError, match="nothing to try it on"):
        properties.examine(name)


def test_a_wrong_form_is_noticed():
    subject = properties._examined("retention")
    core = subject.core
    wrong = dict(core.forms) | {"quadratic": lambda v: 1.001 * core.loop(v)}
    subject = subject._replace(core=core._replace(forms=wrong))
    with pytest.raises(AssertionError, match="form quadratic"):
        properties._loop(subject)


def test_a_state_that_is_forgotten_is_noticed():
    subject = properties._examined("retention")

    class Forgetful:
        init = staticmethod(subject.layer.stream.init)

        @staticmethod
        def apply(variables, x, **options):
            y, _ = subject.layer.stream.apply(variables, x, **options)
            return y, {"cache": variables["cache"]}

    layer = subject.layer._replace(stream=Forgetful)
    with pytest.raises(AssertionError, match="in pieces of"):
        properties._streaming(subject._replace(layer=layer))


@pytest.mark.parametrize(
    ("holds", "must_fail", "status"),
    [({"permutation"}, set(), 0), (set(), {"permutation"}, 1)],
)
def test_the_program_writes_the_page_and_judges(
    holds, must_fail, status, monkeypatch, tmp_path, capsys
):
    name, document = "linear, both ways", tmp_path / "page.md"
    declared = {name: SUBJECTS[name]._replace(holds=holds, must_fail=must_fail)}
    monkeypatch.setattr(table, "SUBJECTS", declared)
    monkeypatch.setattr(page, "DOCUMENT", document)
    none = costs.Costs(0, None, None, None)
    monkeypatch.setattr(costs, "costs", lambda name: none)
    values = flags.FlagValues()
    audit.define_flags(values)
    values(["audit", "--all"])
    assert audit.main(values) == status
    said = capsys.readouterr().out
    assert ("must fail was declared, but it holds" in said) == bool(status)
    assert ("**BROKEN**" in document.read_text()) == bool(status)


def test_all_goes_with_no_other_flag():
    values = flags.FlagValues()
    audit.define_flags(values)
    values(["audit", "--all", "--workdir=somewhere"])
    with pytest.raises(cli.UsageError, match="--workdir does not go with --all"):
        audit.main(values)


def test_the_layer_is_that_of_the_default_model():
    """Sizes are said once more in train/, which may not read configs/."""
    from configs import tiny_lm

    model = tiny_lm.get_config().model
    for field in dataclasses.fields(costs.LAYER):
        name = field.name
        if name not in ("mlp_width", "positions", "implementation"):
            found = getattr(costs.LAYER, name)
            assert np.array_equal(found, model[name]), name
