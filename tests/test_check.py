"""`shardlight check`: what can be known before a run, without importing torch."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shardlight import cli
from shardlight.framework.config import load
from shardlight.framework.faults import ConfigError, nearest
from shardlight.framework.module_source import Sources
from shardlight.framework.unit_names import class_names
from typer.testing import CliRunner

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model" / "config.yaml"
QUIET = """
import sys
from shardlight.cli import main
sys.argv = ["shardlight", *sys.argv[1:]]
try: main()
finally: print([m for m in ("torch", "lightning") if m in sys.modules])
"""


def here(*arguments: str) -> tuple[int, str, str]:
    """Calls the command in this process: (exit code, standard output, standard error)."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("verb", ["check", "fit"])
def test_faults_are_shown_without_importing_torch(tmp_path, verb):
    command = [sys.executable, "-c", QUIET, verb, str(EXAMPLE), "module.widht=3", "trainer.devices=0"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (made.returncode, made.stdout) == (2, "[]\n")
    assert made.stderr.splitlines() == [
        "command line: module.widht is not a parameter of examples.language_model.model.LanguageModel. "
        "Did you mean 'width'?",
        "command line: trainer.devices is 0; it must be at least 1.",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "outline"),
    [
        ([], "zero3 on 2 ranks, 8 samples per step (batch_size 4 x 1 micro-batch x 2 ranks), 90 steps"),
        (["strategy=single", "trainer.devices=1", "trainer.global_batch_size=12", "trainer.max_epochs=1"],
         "single on 1 rank, 12 samples per step (batch_size 4 x 3 micro-batches x 1 rank), 90 steps or 1 epoch, "
         "whichever ends first"),
        (["trainer.max_steps=null", "trainer.max_epochs=2", "trainer.limit_train_batches=5", "trainer.accumulate_grad_batches=2"],
         "zero3 on 2 ranks, 16 samples per step (batch_size 4 x 2 micro-batches x 2 ranks), 3 steps per epoch at most, "
         "2 epochs"),
        (["strategy={name: pipeline, stages: 4}", "trainer.devices=8", "trainer.accumulate_grad_batches=2"],
         "pipeline on 8 ranks (4 stages x 2 data ranks), 16 samples per step (batch_size 4 x 2 batches x 2 data ranks), "
         "each batch in 4 micro-batches by 1f1b, 90 steps"),
    ],
)  # fmt: skip
def test_a_config_without_faults_is_told_in_one_line(overrides, outline):
    assert here("check", str(EXAMPLE), *overrides) == (0, f"{EXAMPLE}: {outline}. No faults.\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "gone.yaml"], "gone.yaml: cannot be read: No such file or directory.\n"),
        (["check", "."], ".: cannot be read: Is a directory.\n"),
        (["check", "bytes.yaml"], "bytes.yaml: not UTF-8 text (byte 0).\n"),
        (["check", "empty.yaml", "nonsense"], "command line: nonsense is not key.path=value. Write nonsense=VALUE.\n"),
        (["fit", "gone.yaml"], "gone.yaml: cannot be read: No such file or directory.\n"),
        (["bench", "diff", "gone.json", "b"], "gone.json: cannot be read (No such file or directory).\n"),
    ],
)
def test_a_mistake_in_the_call_has_no_traceback(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("bytes.yaml").write_bytes(b"\xff\xfe")
    Path("empty.yaml").touch()
    code, out, err = here(*arguments)
    assert (code, out) == (2, "") and err.endswith(said) and "Traceback" not in err


BAD = sorted((Path(__file__).parent / "bad_configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def bad_configs(tmp_path_factory):
    """The folder of bad configs as a project of its own."""
    folder = tmp_path_factory.mktemp("bad_configs")
    shutil.copytree(BAD[0].parent, folder, dirs_exist_ok=True)
    (folder / "pyproject.toml").touch()
    (folder / "broken.py").write_text("class Model(\n")
    return folder


@pytest.mark.case("C017")
@pytest.mark.case("C023")
@pytest.mark.parametrize("name", [path.stem for path in BAD])
def test_a_bad_config_gets_all_that_is_said_of_it_at_once(bad_configs, monkeypatch, name):
    """`# expect: :LINE: REGEX` at its head, one for each fault; nothing of the project is imported for it."""
    monkeypatch.chdir(bad_configs)
    monkeypatch.setattr("importlib.import_module", lambda module: pytest.fail(f"{module} is imported"))
    expected = re.findall(r"^# expect: (.*)", Path(f"{name}.yaml").read_text(), re.MULTILINE)
    with pytest.raises(ConfigError) as caught:
        load(f"{name}.yaml", imports=False)
    said = [line.replace(str(bad_configs), "FOLDER") for line in str(caught.value).splitlines()]
    assert expected and len(said) == len(expected), said
    for line, pattern in zip(said, expected, strict=True):
        assert re.fullmatch(re.escape(f"{name}.yaml") + pattern, line), line


def test_there_are_enough_bad_configs_and_each_is_bad_for_its_own_reason():
    assert len(BAD) >= 60
    heads = ["".join(re.findall(r"^# expect: :\d+:(.*\n)", path.read_text(), re.MULTILINE)) for path in BAD]
    assert len(set(heads)) >= len(BAD) - 1


MODULE = """
from lightning.pytorch import LightningModule
from shardlight_test_parts.blocks import Block
class Model(LightningModule):
    def configure_optimizers(self): return None
"""


def test_units_are_known_where_all_parts_of_a_model_are(tmp_path, monkeypatch):
    package = tmp_path / "shardlight_test_parts"
    package.mkdir()
    (package / "model.py").write_text(MODULE)
    (package / "blocks.py").write_text("from .deep import Deeper\nfrom torch import nn\nclass Block(nn.Module): pass\n")
    (package / "deep.py").write_text("class Deeper: pass\n")
    known = class_names(Sources(tmp_path), "shardlight_test_parts.model")
    assert {"Block", "Deeper", "Model", "TransformerEncoderLayer", "Linear"} <= known and "Blok" not in known
    for text in (
        "import yaml\n",
        "def f():\n    from yaml import x\n",
        "A = type('B', (), {})\n",
        "import importlib\n",
        "globals()['X'] = 1\n",
    ):
        (package / "deep.py").write_text(text)
        assert class_names(Sources(tmp_path), "shardlight_test_parts.model") is None, text


@pytest.mark.parametrize(
    "body",
    [
        "self.log(f'{x}/loss', 1)",
        "self.log_dict(x)",
        "self.log_dict({x: 1})",
        "log_all(self)",
        "self.log",  # nothing is logged at all
        "globals()['f'](x)",
    ],
)
def test_what_may_be_logged_is_no_fault(tmp_path, monkeypatch, body):
    monkeypatch.chdir(tmp_path)
    source = f"""
from shardlight.framework import TrainingModule
from lightning.pytorch import LightningDataModule
class Model(TrainingModule):
    def training_step(self, x, i): {body}
class Data(LightningDataModule):
    def train_dataloader(self): return []
"""
    Path("shardlight_test_logs.py").write_text(source)
    Path("config.yaml").write_text(
        "module: {class: shardlight_test_logs.Model}\ndata: {class: shardlight_test_logs.Data}\n"
        "optimizer: {name: adam, lr: 1}\ntrainer: {max_steps: 1}\ncheckpoint: {monitor: loss}\n"
    )
    assert load("config.yaml", imports=False)
    if body == "self.log":
        with pytest.raises(ConfigError, match=r"logs no 'los'\. Did you mean 'loss'\?"):
            load("config.yaml", ["checkpoint.monitor=los"], imports=False)
    else:
        assert load("config.yaml", ["checkpoint.monitor=los"], imports=False)


def test_a_backend_of_torch_compile_that_is_not_there_is_found_before_launch(bad_configs, monkeypatch):
    monkeypatch.chdir(bad_configs)
    monkeypatch.syspath_prepend(bad_configs)
    path = "sum_backend_without_compile.yaml"
    with pytest.raises(ConfigError) as caught:
        load(path, ["strategy.compile=blocks", "strategy.compile_backend=aot_egaer"], imports=False)
    assert (
        str(caught.value)
        == "command line: strategy.compile_backend: torch.compile has no backend aot_egaer. Did you mean 'aot_eager'?"
    )
    for name in ("aot_eager", "eager_noexcept"):
        assert load(path, ["strategy.compile=blocks", f"strategy.compile_backend={name}"], imports=False)
    sys.modules.pop("project")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("adamm", ["adam", "adamw", "sgd"], "adamw"),
        ("adma", ["adam", "adamw"], "adam"),
        ("AdamW", ["adam", "adamw"], "adamw"),
        ("bf16", ["32-true", "bf16-mixed", "bf16-true"], "bf16-true"),
        ("16", ["32-true", "16-mixed"], "16-mixed"),
        ("cosine_with_warmup", ["constant", "cosine"], "cosine"),
        ("weigth_decay", ["weight_decay", "lr_decay"], "weight_decay"),
        ("x", ["adam", "xyz"], None),
        ("", ["adam"], None),
    ],
)
def test_the_word_that_was_meant(word, known, meant):
    assert nearest(word, known) == meant
