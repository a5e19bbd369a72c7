"""A run that cannot fit is refused before it takes anything, with the smallest change that would fit; others are not."""

import io
from dataclasses import replace

import pytest
from command import run_command
from rich.console import Console
from shardlight.framework.room_table import show_room
from shardlight.ops import host_collectives, memory, sums
from shardlight.ops.disk import BLOCK_BYTES
from shardlight.strategies.byte_words import in_words
from shardlight.strategies.engine import backing
from shardlight.strategies.engine import estimate as arithmetic
from shardlight.strategies.engine.estimate import BufferShape, ParameterShape, Setting, UnitShape, estimate
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import NoRoomError
from shardlight.strategies.room import Room, There, refuse_without_room
from test_cli import project  # noqa: F401

GIB = 1 << 30
ADAM = {"exp_avg": 4, "exp_avg_sq": 4}
BLOCK = UnitShape(name="block", buffers=(BufferShape(parameters=(ParameterShape(numel=1 << 24, moments=ADAM),)),))
UNITS = (BLOCK,) * 16
"""1 GiB of weights in 16 blocks: 4 GiB of state."""


def room(plan, memory_gib, disk_gib, ranks=2, units=UNITS, hosts=1, **settings):
    offload = settings.get("offload")
    if plan == "infinity" and offload is None:
        settings["offload"] = Offload(parameters="disk", gradients="disk", optimizer="disk", disk="swap")
    free = {"host": int(memory_gib * GIB), "disk": int(disk_gib * GIB)}
    everyone = [
        There(places={"host": f"host {r * hosts // ranks}", "disk": f"disk {r * hosts // ranks}"}, free=free)
        for r in range(ranks)
    ]
    setting = Setting(plan=PLANS[plan], ranks=ranks, world_size=ranks, reduce=PLANS[plan].reduce, **settings)
    return Room(units=units, setting=setting, rank=0, everyone=everyone)


def refusal(*arguments, **options):
    return refused(room(*arguments, **options))


def refused(room):
    with pytest.raises(NoRoomError) as error:
        refuse_without_room(room)
    return str(error.value)


def test_constants_are_those_of_what_they_tell_of():
    assert arithmetic.BLOCK_BYTES == BLOCK_BYTES and arithmetic.SHARD_MULTIPLE == sums.CHUNK
    assert arithmetic.RING_BYTES == host_collectives.RING_BYTES
    assert (arithmetic.MOVED_FROM_BYTES, arithmetic.CHUNK_BYTES) == (backing.MOVED_FROM_BYTES, backing.CHUNK_BYTES)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_is_the_tables(plan, ranks):
    """The bytes of plan.py's table, and 16 bytes a parameter on disk for infinity."""
    numel = 16 << 24
    if plan == "infinity":
        told = room(plan, 1, 1, ranks).estimate
        assert told.nbytes("disk") == 16 * numel // ranks
        assert told.certain("host") == 4 << 24, "a unit is gathered"
        return
    setting = Setting(plan=PLANS[plan], ranks=ranks, world_size=ranks, reduce=PLANS[plan].reduce)
    told = estimate(UNITS, setting)
    gathered = (4 << 24) * PLANS[plan].shard_parameters
    assert told.certain("host") == PLANS[plan].state_bytes(numel, ranks) + gathered


@pytest.mark.parametrize(
    "plan, memory_gib, disk_gib, ranks, change",
    [
        # 8 GiB for two ranks under ddp, 6 under zero1, 5 under zero2, 4.125 under zero3.
        ("ddp", 7, 0, 2, "strategy: zero1."),
        ("ddp", 5.5, 0, 2, "strategy: zero2."),
        ("ddp", 4.5, 0, 2, "strategy: zero3."),
        ("zero1", 4.5, 0, 2, "strategy: zero3."),
        ("ddp", 4.1, 0, 2, "trainer.devices: 1."),
        ("zero2", 3.5, 9, 2, "strategy.offload: {optimizer: disk, disk: swap}."),
        ("zero3", 2.2, 9, 2, "strategy.offload: {optimizer: disk, disk: swap}."),
        ("zero3", 1.2, 9, 2, "strategy.offload: {optimizer: disk, gradients: disk, disk: swap}."),
        ("zero3", 0.5, 9, 2, "strategy: infinity."),
        ("ddp", 1.2, 9, 2, "strategy: infinity."),
        ("single", 3, 9, 1, "strategy: infinity."),
        ("infinity", 2, 3.5, 2, "strategy.gradients: device."),
        ("infinity", 2.5, 2.5, 2, "strategy.optimizer: device."),
        ("infinity", 0.1, 9, 2, "trainer.devices: 1."),
        ("zero3", 0.01, 9, 2, None),
        ("infinity", 0.2, 2.5, 2, None),
    ],
)
def test_what_cannot_fit_is_refused_with_the_smallest_change_that_would(plan, memory_gib, disk_gib, ranks, change):
    text = refusal(plan, memory_gib, disk_gib, ranks)
    assert text.startswith(f"{plan} does not fit: ") and "--force" in text
    if change is None:
        assert "No strategy here would make it fit: it takes" in text
    else:
        assert f"This would fit: {change}" in text, text


def test_a_refusal_names_the_line_that_kills_it_and_what_is_there():
    text = refusal("ddp", 7, 0)
    assert (
        "ddp does not fit: optimizer state 2 GiB + weights 1 GiB + gradients 1 GiB x 2 ranks = 8 GiB, and 7 GiB" in text
    )
    text = refusal("infinity", 2, 3.5)
    assert "x 2 ranks = 4 GiB, and 3.5 GiB of space for swap files in swap are there" in text


def test_what_fits_by_a_byte_is_not_refused():
    for plan in PLANS:
        needed = {where: room(plan, 1, 1).estimate.certain(where) for where in ("host", "disk")}
        for hosts in (1, 2):
            of_all = {where: n * 2 // hosts / GIB for where, n in needed.items()}
            refuse_without_room(room(plan, of_all["host"], of_all["disk"], hosts=hosts))
            assert "does not fit" in refusal(plan, of_all["host"] - 1 / GIB, of_all["disk"], hosts=hosts)
        if needed["disk"]:
            assert "does not fit" in refusal(plan, 9, needed["disk"] * 2 / GIB - 1 / GIB)


def pipeline_room(memory_gib, zero="zero1", hosts=1, data_ranks=2):
    """Two stages on two data ranks each: three quarters of the blocks on the first."""
    found = room(zero, memory_gib, 9, ranks=2 * data_ranks, hosts=hosts)
    plan = replace(PLANS[zero], name="pipeline", reduce="window")
    stages = UNITS[:12], UNITS[12:]
    by_rank = [stages[rank // data_ranks] for rank in range(2 * data_ranks)]
    return replace(found, by_rank=by_rank, setting=replace(found.setting, plan=plan, ranks=data_ranks, reduce="window"))


def test_a_pipeline_takes_what_its_stages_take():
    whole = room("zero1", 99, 9)  # both data ranks of an undivided model
    parts = pipeline_room(99)
    assert parts.together("host", certain=True) == whole.together("host", certain=True) == 6 * GIB
    first, last = (replace(parts, rank=rank).estimate.certain("host") for rank in (0, 2))
    assert first == 3 * last
    refuse_without_room(pipeline_room(6))
    text = refused(pipeline_room(5.9, "ddp"))
    assert "on rank 0, with the other ranks of its host = 8 GiB, and 5.9 GiB of memory" in text
    assert "This would fit: strategy.zero: 3." in text
    assert "trainer.devices" not in refused(pipeline_room(1))
    # Each stage on a host of its own: the first one's is too small.
    refuse_without_room(pipeline_room(4.5, hosts=2))
    assert "does not fit" in refused(pipeline_room(4.4, hosts=2))


def test_weights_that_are_there_already_count_as_room():
    found = room("ddp", 7, 0)
    held = [replace(there, held=GIB) for there in found.everyone]
    refuse_without_room(replace(found, everyone=held))
    unknown = [replace(there, free={}) for there in found.everyone]
    refuse_without_room(replace(found, everyone=unknown))


def test_an_optimizer_that_needs_whole_parameters_is_not_sent_to_disk():
    with pytest.raises(NoRoomError, match="No strategy here would make it fit"):
        refuse_without_room(replace(room("zero3", 2.2, 9), whole=True))


def test_the_table_says_what_goes_where_and_what_is_there():
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        show_room(room("infinity", 7, 9), Console(file=out, force_terminal=terminal, width=100, color_system=None))
        shown[terminal] = out.getvalue()
    lines = [line.split() for line in shown[True].splitlines()]
    assert ["optimizer", "state", "1", "GiB"] in lines and ["there", "7", "GiB", "9", "GiB"] in lines
    assert "2 ranks of this host" in shown[True] and "activations" in shown[True]
    assert "\x1b" not in shown[False] and "needed by 2 ranks of this host:" in shown[False]
    assert "disk per rank: 2 GiB (weights 512 MiB, gradients 512 MiB, optimizer state 1 GiB)" in shown[False]


def test_memory_is_what_the_control_groups_around_a_process_leave(tmp_path):
    def group(folder, **files):
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(str(text))

    group(tmp_path / "a", memory_max="max", memory_current=5)
    assert memory._left_in_group(tmp_path / "a", False) is None and memory._left_in_group(tmp_path, False) is None
    group(tmp_path / "a", memory_max=1000, memory_current=400, memory_stat="anon 300\nactive_file 50\ninactive_file 30")
    assert memory._left_in_group(tmp_path / "a", False) == 680, "the system drops pages of files"
    (tmp_path / "a" / "memory.swap.max").write_text("100")
    (tmp_path / "a" / "memory.swap.current").write_text("40")
    assert memory._left_in_group(tmp_path / "a", True) == 740
    assert in_words(680) == "680 B"


HUGE = """
import torch
from faulty import FaultyModule

class Huge(FaultyModule):
    def __init__(self):
        super().__init__()
        self.huge = torch.nn.Parameter(torch.zeros(1_000_000, 1_000_000))
"""


def test_fit_shows_what_it_takes_and_refuses_what_cannot_fit(project):  # noqa: F811
    fit = ["fit", "config.yaml", "checkpoint=null", "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0"]
    (project / "huge.py").write_text(HUGE)
    done = run_command([*fit, "module.class=huge.Huge", "strategy=infinity"], project, timeout_s=120)
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert "NoRoomError: infinity does not fit: " in done.output and "No strategy here" in done.output, done.output
    done = run_command([*fit, "strategy=infinity"], project, timeout_s=120)
    assert done.code == 0 and "disk per rank: 8 KiB (weights 4 KiB, gradients 4 KiB)" in done.output, done.output
    done = run_command([*fit, "strategy={name: infinity, disk: config.yaml}", "--force"], project, timeout_s=120)
    assert done.code == 1 and "disk: config.yaml is no folder" in done.output and "Traceback" not in done.output
