"""How a loader was given its arguments: Lightning makes loaders anew, and for predictions names one of them itself."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader


def take_arguments_by_name(trainer: Trainer) -> None:
    """Lets the trainer make loaders anew that were given their batch size by its place, `DataLoader(dataset, 8)`.

    Lightning makes every loader anew for predictions, with all that was given by its place and the batch size by name:
    it would be given twice.
    """
    connector = trainer._data_connector
    if "_prepare_dataloader" in vars(connector):
        return
    prepare = connector._prepare_dataloader

    def prepare_named(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        saved = vars(dataloader) if isinstance(dataloader, DataLoader) else {}
        placed, names = saved.get("__pl_saved_args", ()), saved.get("__pl_saved_arg_names", ())
        if mode is RunningStage.PREDICTING and len(placed) == len(names):
            saved["__pl_saved_kwargs"] = {**saved.get("__pl_saved_kwargs", {}), **dict(zip(names, placed, strict=True))}
            saved["__pl_saved_args"], saved["__pl_saved_arg_names"] = (), ()
        return prepare(dataloader, shuffle, mode)

    connector._prepare_dataloader = prepare_named  # type: ignore[method-assign]
