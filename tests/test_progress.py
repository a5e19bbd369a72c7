"""Progress and the meter behind it: what is counted, what a person reads, on a terminal and elsewhere."""

import io
import re
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from rich.console import Console
from shardlight.framework.meter import Meter, count_tokens, peak_memory_bytes, step_loss, token_unit
from shardlight.framework.progress import Progress, clock_time, short_number
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Clock:
    """Time that goes on by `tick` seconds whenever somebody looks."""

    def __init__(self, tick=0.0):
        self.now = 0.0
        self.tick = tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.mark.parametrize(
    ("batch", "tokens", "unit"),
    [
        ({"tokens": torch.zeros(2, 3), "labels": torch.tensor([[1, -100, 0], [2, 2, -1]])}, 4, "tokens"),
        ({"tokens": torch.zeros(2, 3)}, 6, "tokens"),
        ({"image": torch.zeros(5, 3)}, 5, "samples"),
        ({"tokens": torch.zeros(4, 3), "labels": torch.zeros(4)}, 12, "tokens"),  # labels of a regression
        (torch.zeros(7, 2), 7, "samples"),
        ([torch.zeros(3, 2), torch.zeros(3)], 3, "samples"),
        (torch.tensor(1.0), 1, "samples"),
        ([], 1, "samples"),
        ({}, 1, "samples"),
        ("text", 1, "samples"),
    ],
)
def test_tokens_of_a_batch(batch, tokens, unit):
    assert int(count_tokens(batch)) == tokens
    assert token_unit(batch) == unit


def test_meter_leaves_out_pauses():
    clock = Clock()
    meter = Meter(clock)
    clock.now = 100.0  # before the start
    meter.resume()
    for _ in range(2):
        clock.now += 2.0
        meter.add(10)
        meter.add(torch.tensor(10))
        meter.step()
    meter.pause()
    clock.now += 50.0
    meter.resume()
    clock.now += 2.0
    meter.add(20)
    meter.step()
    assert (meter.tokens, meter.seconds) == (60, 6.0)
    assert (meter.recent_tokens_per_s, meter.recent_step_s) == (10.0, 2.0)


def test_recent_rate_forgets_old_steps():
    clock = Clock()
    meter = Meter(clock)
    assert (meter.recent_tokens_per_s, meter.recent_step_s) == (0.0, 0.0)
    meter.resume()
    for seconds in [100.0] + [1.0] * 20:
        clock.now += seconds
        meter.add(5)
        meter.step()
    assert (meter.recent_tokens_per_s, meter.recent_step_s) == (5.0, 1.0)
    assert meter.seconds == 120.0


def test_peak_memory_is_that_of_this_process():
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(2**24)  # 64 MiB
    assert before > 100 * 2**20
    assert peak_memory_bytes(torch.device("cpu")) >= before
    del block


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux")
def test_peak_memory_of_a_child_does_not_start_with_that_of_its_parent():
    block = torch.ones(2**26)  # 256 MiB: more than the child needs
    code = "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    child = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True, text=True)
    assert int(child.stdout) * 1024 < block.numel() * 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.234, "1.23"), (950, "950"), (999.6, "1k"), (1234, "1.23k"), (45_600, "45.6k"), (7.89e6, "7.89M")],
)
def test_short_number(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (6.6, "0:07"), (720, "12:00"), (3723, "1:02:03")])
def test_clock_time(seconds, text):
    assert clock_time(seconds) == text


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def training_step(self, batch, batch_idx):
        return self.weight.sum() * 3

    def validation_step(self, batch, batch_idx):
        self.log("val/bpb", 2.5, prog_bar=True, batch_size=1)
        self.log("val/hidden", 1.0, batch_size=1)


class WindowLoss(SingleDeviceStrategy):
    """A stock strategy with what ours add: loss of the window, number of ranks with different data."""

    window_loss = 1.25
    data_world_size = 4


def fit(progress, tmp_path, steps=4, module=None, **options):
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_model_summary": False, "max_steps": steps, "default_root_dir": tmp_path}
    data = DataLoader([{"tokens": torch.zeros(10)}] * 8, batch_size=1)
    Trainer(**{**settings, **options}, callbacks=[progress]).fit(module or Model(), data, data)


def run(tmp_path, terminal=False, width=160, **options):
    """Returns what was written."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, highlight=False, soft_wrap=True)
    every_s = options.pop("every_s", 5.0)
    fit(Progress(every_s=every_s, console=console, clock=Clock(tick=0.5)), tmp_path, **options)
    return file.getvalue()


def test_plain_lines(tmp_path):
    lines = run(tmp_path, every_s=0.0, val_check_interval=2, limit_val_batches=1).splitlines()
    assert lines[2] == lines[5].replace("step 4", "step 2") == "step 2/4  val/bpb 2.500"
    lines = [line for line in lines if "val" not in line]
    pattern = r"step (\d)/4  loss 3\.000  ([\d.]+)k? tokens/s  ETA (\d:\d\d)  memory \d+ MiB"
    matches = [re.fullmatch(pattern, line) for line in lines]
    assert all(matches), lines
    assert [match[1] for match in matches] == ["1", "2", "3", "4"]
    assert matches[-1][3] == "0:00"


def test_plain_lines_are_seldom_but_for_the_first_and_last_step(tmp_path):
    lines = run(tmp_path, every_s=1000.0, limit_val_batches=0).splitlines()
    assert [line.split()[1] for line in lines] == ["1/4", "4/4"]


def test_rate_is_that_of_all_ranks_and_loss_that_of_the_window(tmp_path):
    # The first step takes one tick of 0.5 s for the 10 tokens of this rank, and there are 4 ranks.
    line = run(tmp_path, every_s=0.0, limit_val_batches=0, strategy=WindowLoss(device="cpu")).splitlines()[0]
    assert line.split("  ")[1:3] == ["loss 1.250", "80 tokens/s"]


def test_a_step_of_several_batches_counts_once_with_all_its_tokens(tmp_path):
    lines = run(tmp_path, every_s=0.0, limit_val_batches=0, accumulate_grad_batches=2).splitlines()
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert all("loss 3.000" in line for line in lines)  # Lightning's own is divided by the window's length
    assert lines[0].split("  ")[2] == "40 tokens/s"


def test_bar_on_a_terminal(tmp_path):
    output = run(tmp_path, terminal=True, val_check_interval=2, limit_val_batches=1)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    last = [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]
    assert re.fullmatch(
        r"step 4/4 ━{24} loss 3\.000  [\d.]+k? tokens/s  ETA 0:00  memory \d+ MiB  val/bpb 2\.500\s*", last
    ), last
    assert "validating" in text
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is hidden and shown again


def test_on_a_narrow_terminal_the_bar_gives_way(tmp_path):
    output = run(tmp_path, terminal=True, width=80, val_check_interval=2, limit_val_batches=1)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    last = [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]
    assert re.fullmatch(r"step 4/4 ━+ loss 3\.000  \S+ tokens/s  ETA 0:00  \d+ MiB  val/bpb 2\.500\s*", last), last
    assert len(last) <= 80


class Boom(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def test_the_terminal_is_as_before_when_training_fails(tmp_path):
    file = io.StringIO()
    progress = Progress(console=Console(file=file, force_terminal=True, width=160))
    with pytest.raises(ValueError, match="boom"):
        fit(progress, tmp_path, module=Boom(), limit_val_batches=0)
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_other_ranks_show_nothing(tmp_path, capsys):
    file = io.StringIO()
    progress = Progress(console=Console(file=file))
    progress.enable = progress.disable  # as on a rank that is not 0
    progress.disable()
    fit(progress, tmp_path, limit_val_batches=0)
    progress.print("nothing")
    assert file.getvalue() == ""


def test_it_is_the_trainers_progress_bar(tmp_path, capsys):
    class Prints(Model):
        def on_train_start(self):
            self.print("hello from the module")

    fit(Progress(), tmp_path, module=Prints(), limit_val_batches=0)
    output = capsys.readouterr().out
    assert "hello from the module\n" in output
    assert "step 1/4" in output  # the only bar: Lightning adds none of its own
    assert "Epoch" not in output


def test_step_loss_without_a_loss(tmp_path):
    assert step_loss(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), None) is None
