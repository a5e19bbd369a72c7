"""Which ranks this process belongs to: none yet, or started by our launcher, by torchrun, or by SLURM."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from shardlight.framework.config import Loaded
from shardlight.framework.faults import ConfigError, Fault
from shardlight.framework.launch import STORE
from shardlight.framework.schema import TrainerConfig
from shardlight.strategies.errors import LaunchError


@dataclass(frozen=True)
class World:
    """The ranks a launcher started, and this process's place among them."""

    launcher: str
    """shardlight, torchrun or SLURM."""
    rank: int
    """Of this process, from 0 to world_size - 1."""
    world_size: int
    """Processes over all nodes."""


def check_devices(loaded: Loaded) -> None:
    """Raises: ConfigError: the config asks for devices that this machine does not have."""
    if loaded.config.trainer.accelerator == "cuda" and not torch.cuda.is_available():
        text = "trainer.accelerator is cuda, but PyTorch sees no CUDA device. Set cpu or auto."
        home = loaded.tree.find("trainer.accelerator") or loaded.tree
        raise ConfigError([Fault(home.origin, text)])


def find_world(env: Mapping[str, str]) -> World | None:
    """Reads the launcher's variables; None where no launcher started this process.

    Raises: LaunchError: a variable is missing, not a number, or the rank is not below the world size.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        world = World("shardlight" if STORE in env else "torchrun", _number(env, "RANK"), _number(env, "WORLD_SIZE"))
        names = ("RANK", "WORLD_SIZE")
    elif {"SLURM_NTASKS", "SLURM_PROCID"} <= env.keys() and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        world = World("SLURM", _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS"))
        names = ("SLURM_PROCID", "SLURM_NTASKS")
    else:
        return None
    if not 0 <= world.rank < world.world_size:
        text = f"{names[0]} is {world.rank} and {names[1]} is {world.world_size}: ranks go from 0 to {names[1]} - 1."
        raise LaunchError(text)
    return world


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r} in the environment, but must be a whole number: the launcher sets it.")
    return int(text)


def check_world(world: World, trainer: TrainerConfig) -> None:
    """Compares the ranks that were started with those the config asks for.

    Raises: LaunchError: they differ, in number or by node; names both.
    """
    asked = f"trainer.devices {trainer.devices} x trainer.num_nodes {trainer.num_nodes} = {trainer.world_size}"
    if world.world_size != trainer.world_size:
        raise LaunchError(
            f"{world.launcher} started {world.world_size} process{'es' if world.world_size > 1 else ''}, but {asked}. "
            f"Start {trainer.world_size}, or set trainer.devices or trainer.num_nodes."
        )


def adopt_slurm(env: dict[str, str] | os._Environ[str], devices: int) -> None:
    """Sets torchrun's variables from SLURM's, so that one kind of environment is left.

    The address is that of the first node of the job and the port follows from the job's id, as Lightning does it.
    """
    rank = int(env["SLURM_PROCID"])
    local = env.get("SLURM_LOCALID", str(rank % devices))
    node = env.get("SLURM_NODEID", str(rank // devices))
    if "MASTER_ADDR" not in env:
        nodes = env.get("SLURM_NODELIST", env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        env["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(nodes)
    job = env.get("SLURM_JOB_ID", "")
    env.setdefault("MASTER_PORT", str(15000 + int(job[-4:])) if job.isdecimal() else "12910")
    env |= {"RANK": str(rank), "LOCAL_RANK": local, "GROUP_RANK": node, "NODE_RANK": node}
    env |= {"WORLD_SIZE": env["SLURM_NTASKS"], "LOCAL_WORLD_SIZE": str(devices)}
    env.setdefault("TORCHELASTIC_RUN_ID", f"slurm-{job}")
