"""A whole config checked before any process starts: all faults at once, each with its place and a mend."""

import dataclasses
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardlight.framework.check import BAD, Checker, show
from shardlight.framework.class_source import FromSource
from shardlight.framework.classes import ClassConfig, Classes, project_root
from shardlight.framework.described import (
    CALLBACK,
    DATA_MODULE,
    GONE,
    LOADERS,
    MODULE,
    STEPS,
    TRAINING_MODULE,
    Described,
    FromImport,
    Reader,
    UnclearError,
)
from shardlight.framework.faults import DEFAULT, ConfigError, Fault, nearest, suggest
from shardlight.framework.logged_names import is_logged, logged_names, watched
from shardlight.framework.misplaced import STRATEGY_SYNONYMS, misplaced
from shardlight.framework.resolve import interpolate, load_tree, named_strategy
from shardlight.framework.schema import (
    AUTO,
    SECTIONS,
    Config,
    InitFromConfig,
    ResumeConfig,
    StrategyConfig,
    TrainerConfig,
)
from shardlight.framework.source import BROKEN, Node, from_python
from shardlight.framework.sums import Sums
from shardlight.framework.unit_names import class_names
from shardlight.strategies.checkpoint.candidates import FOLDER
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.options import OPTIONS, make_options, without_effect

USUAL_BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs")
"""Backends of torch.compile that every version has; of others torch is asked."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checked config and where each of its values was written.

    Attributes:
        config: the frozen config.
        tree: the merged and resolved source.
        derived: dotted path -> why a value that nobody wrote is what it is.
    """

    config: Config
    tree: Node
    derived: Mapping[str, str]

    def origin(self, path: str) -> str:
        """Where the value at a dotted path was written: a file and line, "command line", "default", ..."""
        node = self.tree.find(path)
        if path in self.derived:
            return self.derived[path]
        return str(DEFAULT if node is None else node.origin)


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = (), trust: Iterable[str] = ()) -> Config:
    """Reads and checks a config file.

    Args:
        path: of the YAML file.
        overrides: `key.path=value` each; they win over the file.
        trust: packages outside the project whose classes the config may name.
    Raises: ConfigError: with every fault of the config.
    """
    return load(path, overrides, trust).config


def load(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    trust: Iterable[str] = (),
    *,
    verb: str = "fit",
    imports: bool = True,
) -> Loaded:
    """As `load_config`, with the origin of every value.

    Args:
        verb: what only training needs is checked for "fit" only.
        imports: False: classes are only read where their source tells everything, and the config is not to be run.
    """
    path = os.fspath(path)
    tree, faults = load_tree(path, overrides)
    return _check(tree, faults, Path(path).resolve().parent, verb, tuple(trust), imports=imports)


def config_from_dict(
    values: Mapping[str, Any], *, root: str | os.PathLike[str] = ".", trust: Iterable[str] = ()
) -> Config:
    """Checks a config given as plain Python containers, by the same rules as a file.

    Args:
        values: as the YAML file would hold them.
        root: the folder the config would lie in.
        trust: packages outside the project whose classes the config may name.
    Raises: ConfigError: with every fault of the config.
    """
    tree = named_strategy(from_python(values))
    faults: list[Fault] = []
    return _check(interpolate(tree, faults), faults, Path(root).resolve(), "fit", tuple(trust)).config


def _check(
    tree: Node, faults: list[Fault], folder: Path, verb: str, trust: tuple[str, ...], *, imports: bool = True
) -> Loaded:
    """First by the source of the classes, so that a fault shows at once; then by the classes themselves."""
    root = project_root(folder)
    imported = FromImport(root)
    loaded = _Building(tree, faults, folder, verb, trust, (FromSource(root), imported)).build()
    if imports or needs_torch(loaded.config.strategy):
        return _Building(tree, [], folder, verb, trust, (imported,)).build()
    return loaded


def needs_torch(config: StrategyConfig) -> bool:
    """Whether only torch knows if the backend of torch.compile is there."""
    return config.options.compile != "no" and config.options.compile_backend not in USUAL_BACKENDS


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain containers that load to the same config; `extends` is already merged in."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "extends":
            continue
        if isinstance(value, StrategyConfig):
            value = {"name": value.name, **dataclasses.asdict(value.options)}
        elif field.name == "callbacks":
            value = {name: None if item is None else _plain_class(item) for name, item in value.items()}
        values[field.name] = _plain_class(value) if isinstance(value, ClassConfig) else _plain(value)
    return values


def _plain_class(item: ClassConfig) -> dict[str, Any]:
    return {"class": item.class_path, **{name: _plain(value) for name, value in item.arguments.items()}}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


class _Building:
    """One config being built from its tree."""

    def __init__(
        self,
        tree: Node,
        faults: list[Fault],
        folder: Path,
        verb: str,
        trust: tuple[str, ...],
        readers: Sequence[Reader],
    ):
        self.tree = tree
        self.faults = faults
        self.folder = folder
        self.verb = verb
        self.trust = trust
        self.readers = readers
        self.root = project_root(folder)
        self.checker = Checker(faults, self._elsewhere, self.root)
        self.classes: dict[str, ClassConfig] = {}
        self.targets: dict[str, Described] = {}
        self.derived: dict[str, str] = {}

    def build(self) -> Loaded:
        self._top_level()
        values = self.tree.value
        parts: dict[str, Any] = {}
        # A first look without faults, so that a key of the data class is known as such wherever else it stands.
        scout = Classes(self.root, self.trust, Checker([], root=self.root), self.readers)
        for name, base in (("module", MODULE), ("data", DATA_MODULE)):
            scout.load(values.get(name), base, name, self.tree)
        self.targets = scout.targets
        classes = Classes(self.root, self.trust, self.checker, self.readers)
        for name, base in (("module", MODULE), ("data", DATA_MODULE)):
            parts[name] = classes.load(values.get(name), base, name, self.tree)
            if parts[name] is not None:
                self.classes[name] = parts[name]
        parts["callbacks"] = MappingProxyType(dict(self._callbacks(classes)))
        self.targets |= classes.targets
        trainer = self._section("trainer")
        for name in ("run", "optimizer", "schedule", "checkpoint", "init_from", "resume"):
            parts[name] = self._section(name)
        if "seed" in values:
            parts["seed"] = self.checker.convert(values["seed"], int, "seed")
        if isinstance(parts.get("seed"), int) and not 0 <= parts["seed"] < 2**32:
            self.checker.fault(values["seed"], f"seed is {parts['seed']}; it must be from 0 to {2**32 - 1}.")
        parts["vars"] = MappingProxyType(self._mapping("vars"))
        parts["extends"] = tuple(self._extends())
        self.sums = Sums(self.tree, self.checker, self.targets)
        parts["trainer"] = self._batches(trainer)
        self._hooks()
        if self.verb == "fit":
            self._training(trainer, parts)
        parts["strategy"] = self._strategy(None if trainer is BAD else trainer)
        if isinstance(parts["strategy"], StrategyConfig):
            self._units(parts["strategy"])
            self._backend(parts["strategy"])
        self._starts(parts["resume"], parts["init_from"])
        if self.faults:
            raise ConfigError(self.faults)
        if parts["run"].name is None:
            self.derived["run.name"] = "the config's folder"
            parts["run"] = dataclasses.replace(parts["run"], name=self.folder.name or "run")
        return Loaded(Config(**parts), self.tree, MappingProxyType(self.derived))

    def _elsewhere(self, section: str, key: str, node: Node) -> str | None:
        return misplaced(section, key, node, self.tree, self.targets)

    def _top_level(self) -> None:
        """Unknown sections; what was meant is checked as such: all faults come at once, and none for its absence."""
        values, known = self.tree.value, _fields(Config)
        for key, node in values.items():
            if key not in known:
                self.checker.unknown("", key, node, known, "a key of the config")
                meant = {"model": "module", "datamodule": "data"}.get(key) or nearest(key, known)
                if meant and meant not in values:
                    self.tree = Node({**self.tree.value, meant: node}, self.tree.origin)

    def _section(self, name: str) -> Any:
        node = self.tree.value.get(name)
        may_be_off = ("optimizer", "schedule", "init_from", "resume")
        if name in (*may_be_off, "checkpoint") and node is not None and node.value is None:
            return None
        if name in may_be_off and node is None:
            return None
        return self.checker.section(node, SECTIONS[name], name)

    def _mapping(self, name: str) -> dict[str, Any]:
        node = self.tree.value.get(name)
        if node is None or node.value is None:
            return {}
        value = self.checker.convert(node, dict[str, Any], name)
        return {} if value is BAD else value

    def _extends(self) -> list[str]:
        node = self.tree.value.get("extends")
        value = None if node is None else node.plain()
        return [] if value is None else list(value) if isinstance(value, list) else [value]

    def _callbacks(self, classes: Classes) -> Iterator[tuple[str, ClassConfig | None]]:
        node = self.tree.value.get("callbacks")
        if node is None or node.value is None:
            return
        if not isinstance(node.value, dict):
            self.checker.fault(node, f"callbacks must be a mapping of names to {{class: ...}}, got {show(node)}.")
            return
        for name, item in node.value.items():
            if item.value is None:
                yield name, None
            else:
                yield name, classes.load(item, CALLBACK, f"callbacks.{name}", node)

    def _strategy(self, trainer: TrainerConfig | None) -> StrategyConfig | None:
        node = self.tree.value.get("strategy")
        if node is None or node.value is None:
            world_size = 1 if trainer is None else trainer.world_size
            name = "single" if world_size == 1 else "ddp"
            self.derived["strategy.name"] = f"default for {world_size} process{'es' if world_size > 1 else ''}"
            return StrategyConfig(name=name, options=OPTIONS[name]())
        name = self._strategy_name(node)
        if name is None:
            return None
        options = Node({key: item for key, item in node.value.items() if key != "name"}, node.origin)
        made = self.checker.section(options, OPTIONS[name], "strategy", f"an option of {name}")
        if name == "single":
            self.sums.single(node.value["name"], [other for other in OPTIONS if other != name])
        if made is not BAD and trainer is not None:
            for option, fault in without_effect(made, trainer.precision).items():
                self.checker.fault(node.value[option], f"strategy.{fault}")
        if made is not BAD and made.shard_group:
            self.sums.shard_group(node.value["shard_group"], made.shard_group)
        self.sums.mesh(node)
        module = self.targets.get("module")
        # Who cuts batches does it along whatever it likes.
        if made is not BAD and made.micro_batches and module is not None and "split_batch" not in module.defines:
            self.sums.micro_batches(node.value["micro_batches"], made.micro_batches)
        return None if made is BAD else self._made(StrategyConfig(name=name, options=made), node)

    def _made(self, config: StrategyConfig, node: Node) -> StrategyConfig:
        """What the strategy thinks of the values of its options."""
        given = {name: getattr(config.options, name) for name in _fields(type(config.options))}
        try:
            make_options(type(config.options), config.name, given)
        except StrategyError as error:
            # It begins with the option's name.
            named = re.match(r"\w+", str(error))
            at = node.value.get(named[0]) if named and named[0] != "name" else None
            self.checker.fault(node if at is None else at, f"strategy{': ' if at is None else '.'}{error}")
        return config

    def _units(self, config: StrategyConfig) -> None:
        """Classes that the project does not have, where all that its model can be made of are known."""
        module, reader = self.targets.get("module"), self.readers[0]
        if not config.options.units or module is None or not isinstance(reader, FromSource):
            return
        try:
            known = class_names(reader.sources, module.name.rpartition(".")[0])
        except UnclearError:
            return
        for index, name in enumerate(config.options.units if known is not None else ()):
            if name not in known:
                text = f"strategy.units[{index}]: {self._class_of('module')[1]} has no module class {name}."
                self.checker.fault(self.tree.value["strategy"].value["units"], text + suggest(name, known, many=0))

    def _backend(self, config: StrategyConfig) -> None:
        """Asks torch, and the project's modules that register backends of their own, where a name is no usual one."""
        name = config.options.compile_backend
        if not needs_torch(config) or any(isinstance(reader, FromSource) for reader in self.readers):
            return
        compiler = importlib.import_module("torch.compiler")
        every = compiler.list_backends(exclude_tags=())
        if name not in every:
            mend = suggest(name, every, many=0) or suggest(name, compiler.list_backends())
            text = f"strategy.compile_backend: torch.compile has no backend {name}.{mend}"
            self.checker.fault(self.tree.value["strategy"].value["compile_backend"], text)

    def _strategy_name(self, node: Node) -> str | None:
        if node.value is BROKEN:
            return None
        if not isinstance(node.value, dict):
            self.checker.fault(node, f"strategy must be a name or a mapping, got {show(node)}.")
            return None
        named = node.value.get("name")
        if named is None:
            self.checker.fault(node, f"strategy.name is missing: one of {', '.join(OPTIONS)}.")
        elif named.value is not BROKEN and named.value not in list(OPTIONS):
            synonym = STRATEGY_SYNONYMS.get(str(named.value).lower())
            mend = f" It is called {synonym} here." if synonym else suggest(str(named.value).lower(), OPTIONS)
            self.checker.fault(named, f"strategy.name must be a strategy, got {show(named)}.{mend}")
        return named.value if named is not None and named.value in list(OPTIONS) else None

    def _batches(self, trainer: TrainerConfig) -> TrainerConfig:
        """The trainer with the accumulation that the batch sizes give."""
        accumulate, derived = self.sums.accumulation()
        if derived is not None:
            self.derived["trainer.accumulate_grad_batches"] = f"from trainer.global_batch_size, {derived}"
        return trainer if trainer is BAD else dataclasses.replace(trainer, accumulate_grad_batches=accumulate)

    def _class_of(self, section: str) -> tuple[Node, str]:
        """Where the class of a section is named, and its import path there."""
        named = self.tree.value[section].value["class"]
        return named, named.value

    def _hooks(self) -> None:
        """What the module and the data must have for the verb."""
        module, data = self.targets.get("module"), self.targets.get("data")
        if module is not None:
            home, path = self._class_of("module")
            missing = [STEPS[self.verb]] if self.verb in STEPS else []
            if self.verb == "fit" and not module.derives_from(TRAINING_MODULE):
                missing.append("configure_optimizers")
            for name in missing:
                if name not in module.defines:
                    self.checker.fault(home, f"module.class: {path} has no {name}, which {self.verb} needs.")
            for name in sorted(module.defines & GONE.keys()):
                text = f"module.class: {path} has {name}, which Lightning has no longer. Use {GONE[name]}."
                self.checker.fault(home, text)
        if module is not None and data is not None:
            loader = f"{LOADERS[self.verb]}_dataloader"
            if loader not in data.defines | module.defines:
                home, path = self._class_of("data")
                text = f"data.class: {path} has no {loader}, which {self.verb} needs."
                self.checker.fault(home, text)

    def _training(self, trainer: Any, parts: dict[str, Any]) -> None:
        """What only training needs: an end, and an optimizer that the module takes."""
        values = self.tree.value
        if trainer is not BAD and trainer.max_steps is None and trainer.max_epochs is None:
            self.checker.fault(
                values.get("trainer") or self.tree, "trainer.max_steps is missing: set it, or trainer.max_epochs."
            )
        self.sums.warmup()
        self._monitors()
        module = self.targets.get("module")
        if module is None:
            return
        _, path = self._class_of("module")
        if not module.derives_from(TRAINING_MODULE):
            for name in ("optimizer", "schedule"):
                if parts[name] not in (None, BAD):
                    text = f"{name} is set, but {path} is no TrainingModule: it makes its own. Remove it."
                    self.checker.fault(values[name], text)
        elif "configure_optimizers" not in module.defines and parts["optimizer"] is None:
            text = f"optimizer is missing: {path} has no configure_optimizers of its own."
            self.checker.fault(values.get("optimizer") or self.tree, f"{text} Write {{name: adamw, lr: 3e-4}}.")

    def _monitors(self) -> None:
        """Names that something watches and that nothing logs, where the source shows all that is logged."""
        module, reader = self.targets.get("module"), self.readers[0]
        if module is None or not isinstance(reader, FromSource):
            return
        asked = [(path, node) for path, node in watched(self.tree) if isinstance(node.value, str)]
        others = [target for path, target in self.targets.items() if path != "module"]
        names = logged_names(reader.sources, module, others) if asked else None
        for path, node in asked if names is not None else ():
            if not is_logged(node.value, names):
                text = f"{path}: {self._class_of('module')[1]} logs no {node.value!r}."
                self.checker.fault(node, text + suggest(node.value, names, what="It logs"))

    def _starts(self, resume: Any, init_from: Any) -> None:
        if isinstance(resume, ResumeConfig) and resume.path != AUTO:
            home = self.tree.find("resume.path") or self.tree
            if not os.path.exists(resume.path):
                self.checker.fault(home, f"resume: there is no checkpoint {resume.path}.")
            elif os.path.isdir(os.path.join(resume.path, FOLDER)):
                text = f"resume: {resume.path} is the folder of a run. Its checkpoints are in {FOLDER}/ there."
                self.checker.fault(home, text)
        if isinstance(init_from, InitFromConfig) and not os.path.exists(init_from.path):
            home = self.tree.find("init_from.path") or self.tree
            self.checker.fault(home, f"init_from: there is no file or folder {init_from.path}.")
