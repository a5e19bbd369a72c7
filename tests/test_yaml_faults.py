"""Files that are no YAML: the line of the mistake, and what is to be done."""

import pytest
from shardlight.framework.faults import ConfigError
from shardlight.framework.source import read_yaml

BASE = """\
module:
  class: project.Model
  width: 8
data:
  class: project.Data
optimizer:
  name: adamw
  lr: 3e-4
strategy: zero2
trainer:
  devices: 2
  max_steps: 100
"""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("strategy: zero2", "strategy:zero2", "9: 'strategy:zero2' needs a space behind its ':'. Write 'strategy: zero2'."),
        ("max_steps: 100", "max_steps:100", "12: 'max_steps:100' needs a space behind its ':'. Write 'max_steps: 100'."),
        ("width: 8", "width:8", "3: 'width:8' needs a space behind its ':'. Write 'width: 8'."),
        ("  class: project.M", "  class:project.M", "2: 'class:project.Model' needs a space behind its ':'. Write 'class: project.Model'."),
        ("devices: 2", "devices:2  # it's two", "11: 'devices:2' needs a space behind its ':'. Write 'devices: 2'."),
        ("width: 8", "width=8", "3: 'width=8' needs ':' instead of '='. Write 'width: 8'."),
        ("trainer:", "trainer", "10: 'trainer' has no ':' behind it. Write 'trainer:'."),
        ("project.Data", '"project.Data', '5: the quote " that is opened here is not closed. Write "project.Data".'),
        ("project.Data", "'it''s", "5: the quote ' that is opened here is not closed. Write 'it''s'."),
        ("100", '"100', '12: the quote " that is opened here is not closed. Write "100".'),
        ("class: project.Data", 'class: "project.Data\n  x: "y"', '5: the quote " that is opened here is not closed. Write "project.Data".'),
        ("project.Data", '"project" Data', "5: there is something behind the closing quote. Put all of the value in quotes."),
        ("project.Data", '"C:\\data"', "5: found unknown escape character 'd': in double quotes a \\ begins an escape. Use single quotes, or write it twice."),
        ("zero2", "{name: zero2", "9: the { that is opened here is not closed. Put a } behind its last item."),
        ("3e-4", "3e-4\n  betas: [0.9, 0.95", "9: the [ that is opened here is not closed. Put a ] behind its last item."),
        ("zero2", "{name: zero2 reduce: window}", "9: expected ',' or '}', but got ':'. Put a comma between two items, and a } behind the last."),
        ("  devices", "\tdevices", "11: there is a tab. Write spaces instead."),
        ("max_steps: ", "max_steps:\t", "12: there is a tab. Write spaces instead."),
        ("  max_steps", "   max_steps", "12: max_steps is indented by 3, and devices on line 11 by 2. Indent the keys of one section alike."),
        ("  max_steps", " max_steps", "12: max_steps is indented by 1, and devices on line 11 by 2. Indent the keys of one section alike."),
        ("  devices", "devices", "12: max_steps is indented by 2, and devices on line 11 by 0. Indent the keys of one section alike."),
        ("project.Data", "project: Data", "5: a value with ': ' in it has to be in quotes. Write class: 'project: Data'."),
        ("project.Data", "*.py", "5: a value that begins with * has to be in quotes. Write class: '*.py'."),
        ("project.Data", "%d", "5: a value that begins with % has to be in quotes. Write class: '%d'."),
        ("trainer:", "x:\n  - *.py\ntrainer:", "11: a value that begins with * has to be in quotes. Write - '*.py'."),
        ("max_steps: 100", "max_steps: 100\n---\na: 1", "13: a config is one document. Remove the line ---, or what follows it."),
    ],
)  # fmt: skip
def test_a_mistake_is_told_at_its_line_with_the_mend(tmp_path, monkeypatch, right, wrong, said):
    monkeypatch.chdir(tmp_path)
    assert right in BASE
    (tmp_path / "c.yaml").write_text(BASE.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        read_yaml("c.yaml")
    line, _, text = said.partition(": ")
    assert str(caught.value) == f"c.yaml:{line}: not valid YAML: {text}"


def test_what_has_no_space_in_braces_is_read_as_it_was_meant(tmp_path):
    (tmp_path / "c.yaml").write_text("strategy: {name:zero2, disk: http://a:1}\nx: [a:b]\n")
    tree, faults = read_yaml(tmp_path / "c.yaml")
    assert [fault.text for fault in faults] == [
        "not valid YAML: 'name:zero2' needs a space behind its ':'. Write 'name: zero2'."
    ]
    assert tree.plain() == {"strategy": {"name": "zero2", "disk": "http://a:1"}, "x": ["a:b"]}


def test_a_tagged_value_has_one_fault(tmp_path):
    (tmp_path / "c.yaml").write_text("a: !!python/name:os.system\nb: !!set {x: 010}\nc: !!str 3\nd: ! plain\n")
    tree, faults = read_yaml(tmp_path / "c.yaml")
    assert [fault.text.split(" is ")[0] for fault in faults] == [
        f"the tag {t}" for t in ("!!python/name:os.system", "!!set", "!!str")
    ]
    assert tree.plain() == {"a": None, "b": None, "c": None, "d": "plain"}
