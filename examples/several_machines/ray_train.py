"""Trains a config on the workers of a Ray cluster: python ray_train.py config.yaml [key=value ...]

Ray Train starts one worker per rank and the process group; each worker then is a rank, as under torchrun. The config,
the project and the run folder have to be at the same path on every node, as on a shared file system.
"""

import sys
from pathlib import Path

from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from shardlight.framework.config import load


def train(given: dict) -> None:
    """What each worker runs: the command, as one rank."""
    import os

    from shardlight.cli import app

    os.chdir(given["folder"])
    # --debug: an error is raised here, so that Ray shows it and ends the other workers.
    app(["fit", "--debug", *given["arguments"]], standalone_mode=False)


def main(config: str, *overrides: str) -> None:
    """Starts as many workers as the config has ranks."""
    trainer = load(config, list(overrides), [], verb="fit").config.trainer
    gpu = trainer.accelerator == "cuda"
    TorchTrainer(
        train,
        train_loop_config={"folder": str(Path.cwd()), "arguments": [str(Path(config).resolve()), *overrides]},
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=trainer.world_size, use_gpu=gpu),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
