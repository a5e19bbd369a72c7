"""Two hosts of two ranks each, in network namespaces: shared memory within a host, gloo over the wire between them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = [f"shardlight-{os.getpid()}-{side}" for side in "ab"]
WORKER = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=4)
from loops import check_equal, plain, sharded
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies.engine import partition
from shardlight.strategies.engine.collectives import Collectives
partition.MIN_UNIT_NUMEL = 0
joined = Collectives(dist.group.WORLD)
assert joined._host.hosts == 2 and joined._host.host == rank // 2, joined.why_not_shared
losses = lambda model, batch, step, rank: [token_loss(model, batch)]
batch = lambda step, rank: token_batch(100 * step + rank, 4, torch.float64)
want = plain(TinyGPT, losses, 4, steps=3, batch=batch)
for plan in ("ddp", "zero2", "zero3"):
    check_equal(sharded(TinyGPT, losses, plan, rank, 4, steps=3, batch=batch), want, plan)
print("equal", flush=True)
dist.destroy_process_group()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """Two namespaces joined by a wire, with the addresses 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs iproute2 and root")
    try:
        ip("netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")
    try:
        ip("netns", "add", NAMES[1])
        ip("link", "add", "wire", "netns", NAMES[0], "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
        for number, name in enumerate(NAMES, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


@pytest.mark.long
def test_training_over_two_hosts_equals_one_process(hosts, tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    started = []
    for rank in range(4):
        host = hosts[rank // 2]
        variables = {"RANK": str(rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555"}
        variables |= {"GLOO_SOCKET_IFNAME": "wire", "SHARDLIGHT_HOST": host}
        variables |= {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", host, sys.executable, str(path)]
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * 4, "\n".join(outputs)[-4000:]
    assert all("equal" in output for output in outputs)
