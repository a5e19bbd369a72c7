"""The pipeline strategy: a model's blocks are cut into stages that micro-batches go through; no model is rewritten.

Every stage runs the user's own `training_step` on each micro-batch ([Note: the cut], engine/pipeline/cut.py). Forwards
and backwards take turns as the schedule says, so both are run by `training_step` of the strategy; its `backward` only
makes the gradients final. Each stage has an engine of its own over the ranks that hold it, a row of the ZeRO table.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from shardlight.strategies.batch_losses import BatchLosses
from shardlight.strategies.engine.part import ModelPart
from shardlight.strategies.engine.partition import find_units
from shardlight.strategies.engine.pipeline.balance import balance, check_balance
from shardlight.strategies.engine.pipeline.chain import Chain, find_chain, stage_parameters
from shardlight.strategies.engine.pipeline.choose import choose
from shardlight.strategies.engine.pipeline.costs import ModelCosts
from shardlight.strategies.engine.pipeline.cut import Cut
from shardlight.strategies.engine.pipeline.estimate import estimated_costs
from shardlight.strategies.engine.pipeline.runner import Runner
from shardlight.strategies.engine.pipeline.schedules import Schedule, build
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.errors import PipelineError, StrategyError
from shardlight.strategies.micro_batches import batch_kind, batch_rows, join_results, split_batch
from shardlight.strategies.model_parallel import ModelParallel, whole_result
from shardlight.strategies.options import PipelineOptions, StagedOptions
from shardlight.strategies.replayed_logs import ReplayedLogs
from torch import Tensor, nn
from torch.optim import Optimizer


class Pipeline(ModelParallel):
    """Stages of a model on different ranks, micro-batches in flight between them; each stage under ZeRO 0 to 3.

    Source: Huang et al. 2019, GPipe (arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473).
    """

    plan: ClassVar[StatePlan] = StatePlan("pipeline", False, False, False, "window")
    options: StagedOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.staged:
            # A window is reduced once, whatever the row: gradients of micro-batches are added up where they arise.
            self.plan = replace(self.plan, reduce="window")  # type: ignore[misc]
        self._stage: _Stage | None = None

    @property
    def staged(self) -> bool:
        """Whether batches go through stages, one micro-batch after the other."""
        return isinstance(self.options, PipelineOptions) or self.options.axes["pipeline"] > 1

    # --- the cut

    @property
    def stage(self) -> "_Stage":
        """What this rank runs. Raises: StrategyError: the Trainer has not set the strategy up yet."""
        if self._stage is None:
            raise StrategyError("pipeline: the model is cut in the Trainer's setup (fit, validate, test, predict).")
        return self._stage

    @property
    def has_results(self) -> bool:
        """Whether steps run to their end on this rank, so that it has what they return."""
        return not self.staged or self.stage.has_last

    def _joint(self) -> Collection[tuple[int, ...]]:
        return self.stage.joint if self.staged else ()

    def _stage_of_results(self) -> int:
        return self.stage.schedule.placement[-1] if self.staged else 0

    def _refuse(self, trainer: pl.Trainer) -> None:
        super()._refuse(trainer)
        module = self.lightning_module
        assert module is not None
        if not self.staged:
            return
        if not module.automatic_optimization:
            raise PipelineError(
                f"{type(module).__name__} uses manual optimization: under pipeline the schedule runs the backwards. "
                "Use automatic optimization, or zero3."
            )
        if is_overridden("backward", module):
            raise PipelineError(
                f"{type(module).__name__}.backward is overridden: under pipeline the schedule runs the backwards, "
                "stage by stage. Leave it out, or use zero3."
            )

    def _cut(self, module: nn.Module) -> ModelPart:
        if not self.staged:
            return super()._cut(module)
        options, mesh, plan = self.options, self.mesh, self._tensor_plan(module)
        chain = find_chain(module, options.blocks)
        costs = estimated_costs(module, chain)
        schedule, counts = self._choose(chain, costs)
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        ranges = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        by_stage = stage_parameters(module, chain, ranges, options.everywhere)
        rank = mesh.place(self.global_rank).pipeline
        on = {
            place: set().union(*(by_stage[stage] for stage in schedule.stages_of(place)))
            for place in range(mesh.pipeline)
        }
        # A weight with several names has the one in checkpoints that other strategies give it.
        names = [n for unit in find_units(module, options.units) for n, _ in unit.params]
        where = {n: tuple(place for place in on if n in on[place]) for n in names}
        shared = {n: places for n, places in where.items() if len(places) > 1}
        if shared and options.shard_group is not None:
            raise PipelineError(
                f"strategy.shard_group: {options.shard_group}: '{next(iter(shared))}' is on several stages (tied, or "
                "named in everywhere), and sharded over all of their ranks. Leave shard_group out, or untie it."
            )
        kept = [p for n, p in module.named_parameters() if n in on[rank]]
        cut = Cut(module, chain, ranges, schedule.stages_of(rank), on[rank], self.root_device)
        for optimizer in self.optimizers:
            _keep_only(optimizer, {id(p) for p in kept})
        own = [(chain.names[i], chain.blocks[i]) for stage in cut.mine for i in ranges[stage]]
        self._stage = _Stage(cut, schedule, counts, sorted(set(shared.values())))
        self._say(chain, schedule, counts, costs)
        part = ModelPart(
            blocks=own,
            shared={n: places for n, places in shared.items() if rank in places},
            elsewhere=frozenset(cut.dropped),
            writes=_writer_of_buffers(module, chain, ranges, schedule.placement, rank),
        )
        return self._cut_matrices(module, plan, part)

    def _choose(self, chain: Chain, costs: ModelCosts) -> tuple[Schedule, tuple[int, ...]]:
        options = self.options
        if options.schedule == "auto":
            choice = choose(
                options.axes["pipeline"],
                options.per_batch,
                costs,
                chunks=options.chunks,
                counts=options.balance or None,
            )
            taken = choice.taken
            # Not choice.reason: by sizes of matrices, nothing is known of bytes of activations.
            idle = f"{taken.simulation.bubble:.1%} of the time is bubble"
            self.on_cut(f"pipeline: schedule {taken}, the fastest of {len(choice.candidates)}: {idle}")
            return build(taken.name, options.axes["pipeline"], options.per_batch, taken.chunks), taken.balance
        schedule = build(options.schedule, options.axes["pipeline"], options.per_batch, options.chunks)
        if options.balance:
            return schedule, check_balance(options.balance, len(chain.blocks), schedule.placement)
        times = [part.time for part in costs.blocks]
        return schedule, balance(times, schedule.placement, costs.before.time, costs.after.time)

    def _say(self, chain: Chain, schedule: Schedule, counts: Sequence[int], costs: ModelCosts) -> None:
        total = sum(p.time for p in (*costs.blocks, costs.before, costs.after)) or 1.0
        first = 0
        for stage, count in enumerate(counts):
            parts = list(costs.blocks[first : first + count])
            parts += [costs.before] * (stage == 0) + [costs.after] * (stage == len(counts) - 1)
            share, where = sum(part.time for part in parts) / total, f"{chain.name} {first} to {first + count - 1}"
            place = schedule.placement[stage]
            ranks = [str(n) for n in range(self.mesh.size) if self.mesh.place(n).pipeline == place]
            self.on_cut(
                f"pipeline: stage {stage}, rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {where}, "
                f"{share:.0%} of the work (by sizes of matrices)"
            )
            first += count

    def setup(self, trainer: pl.Trainer) -> None:
        """Cuts the module, shards this rank's stage, and readies what runs the schedule."""
        if not self.staged:
            super().setup(trainer)
            return
        # Only ranks of the last stage have predictions.
        warnings.filterwarnings("ignore", message="predict returned None")
        super().setup(trainer)
        stage, module = self.stage, self.lightning_module
        assert module is not None
        if stage.runner is None:
            stage.runner = Runner(stage.cut, self.engine, stage.schedule.placement)
            again = len(stage.cut.mine) > 1 or self.options.loss_over == "batch"
            ranks, last = self.engine.ranks.pipeline, self._stage_of_results()
            stage.logs = ReplayedLogs(module, ranks, stage.cut.check, last, again)

    # --- data

    def _cut_batch(self, batch: Any, training: bool) -> "_Parts":
        """Cuts a batch into micro-batches. Collective: in training over all ranks, with as many on every pipeline.

        In an evaluation over those of this pipeline alone: another one may have no batch left.
        """
        module = self.lightning_module
        own = getattr(module, "split_batch", None)
        rows = batch_rows(batch) if own is None else self.options.per_batch
        ranks = self.engine.ranks
        # Ranks of a stage run the same schedule, also where one's batch has fewer samples than there are parts.
        row = torch.tensor([[min(self.options.per_batch, rows), int(torch.randint(1 << 60, (1,)))]])
        asked, first = (ranks.everyone, self.mesh.rank(0, self.data_rank)) if training else (ranks.model, 0)
        known = asked.gather_small(row.to(self.root_device), "a batch's micro-batches").view(-1, 2).tolist()
        parts, seed = min(most for most, _ in known), known[first][1]
        if not parts:
            raise PipelineError("a batch has no sample: let the data loader drop it.")
        split = split_batch(batch, rows, parts) if own is None else list(own(batch, parts))
        sizes = [batch_rows(part) for part in split]
        stage = self.stage
        return _Parts(split, sizes, _schedule(stage.schedule, parts), [seed + part for part in range(parts)])

    # --- steps

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward and backward of all micro-batches; returns the batch's mean loss, on every stage."""
        if not self.staged:
            return super().training_step(batch, *args, **kwargs)
        module, engine, stage = self.lightning_module, self.engine, self.stage
        assert module is not None and stage.runner is not None and stage.logs is not None
        self._before_batch = engine.window, engine.window.micro_batches
        if module.trainer.fit_loop.epoch_loop.batch_idx == 0 and not self._keeps_gradients(module):
            engine.gradients.drop_open_window()
        parts = self._cut_batch(batch, training=True)
        scale = self.precision_plugin.loss_scale
        engine.gradients.begin(scale.scale if scale is not None else 1.0)
        whole = self.options.loss_over == "batch"
        sizes = [sum(parts.sizes)] if whole else parts.sizes
        losses = BatchLosses(sizes, "pipeline")
        scaled = engine.window.loss_scale or 1.0

        def tail() -> Any:
            assert stage.logs is not None
            self._weight = None
            stage.logs.begin(sizes[0], last=True)
            return self._plain_training_step(batch, *args, **kwargs)

        def loss_of(number: int, result: Any) -> Tensor:
            loss, share = losses.add(number, result, self._weight)
            assert stage.logs is not None
            stage.logs.end(*losses.last)
            return loss * (share * scaled)

        with stage.logs.kept():
            stage.runner.train(
                parts.schedule,
                [("train", batch_kind(part)) for part in parts.batches],
                self._step_on(self._plain_training_step, parts, args, kwargs),
                loss_of,
                parts.seeds,
                tail if whole else None,
            )
        total = stage.logs.replay(losses.total() if stage.has_last else None)
        assert total is not None
        engine.window.add_loss(torch.tensor(total.mean, dtype=torch.float64), total.weight, 1.0)
        return torch.tensor(total.mean, dtype=total.dtype, device=self.root_device)

    def _step_on(self, step: Callable[..., Any], parts: "_Parts", args: Any, kwargs: Any) -> Callable[[int], Any]:
        logs, last = self.stage.logs, self.stage.has_last

        def run(number: int) -> Any:
            assert logs is not None
            self._weight = None
            logs.begin(parts.sizes[number], last)
            return whole_result(step(parts.batches[number], *args, **kwargs))

        return run

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Makes gradients final on a stepping batch: `training_step` has run the backwards."""
        if not self.staged:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.lightning_module
        assert module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        if not self._blocked:
            self.engine.close_window()
        return self.precision_plugin.post_backward(loss, module)

    def _evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.staged:
            return super()._evaluation_step(step, *args, **kwargs)
        stage = self.stage
        assert stage.runner is not None and stage.logs is not None
        batch, *rest = args
        name = step.__name__
        with torch.inference_mode(False), torch.no_grad():
            parts = self._cut_batch(batch, training=False)

            kinds = [(name, batch_kind(part)) for part in parts.batches]
            on_part = self._step_on(step, parts, rest, kwargs)
            with stage.logs.kept():
                results = stage.runner.evaluate(parts.schedule, kinds, on_part, stage.logs.end, parts.seeds)
            stage.logs.replay(None)
        self._meet_at_the_end()
        return join_results(results, parts.sizes) if stage.has_last else None


class _Parts:
    """A batch in micro-batches, with what runs them."""

    def __init__(self, batches: list[Any], sizes: list[int], schedule: Schedule, seeds: list[int]) -> None:
        self.batches = batches
        self.sizes = sizes
        self.schedule = schedule
        self.seeds = seeds


class _Stage:
    """What this rank runs of the pipeline."""

    def __init__(self, cut: Cut, schedule: Schedule, counts: Sequence[int], joint: list[tuple[int, ...]]) -> None:
        self.cut = cut
        self.schedule = schedule
        self.counts = tuple(counts)
        self.joint = joint
        """Sets of ranks of a pipeline that share parameters."""
        self.has_last: bool = len(schedule.placement) - 1 in cut.mine
        """Its steps run to their end, and give the loss."""
        self.runner: Runner | None = None
        self.logs: ReplayedLogs | None = None


@cache
def _schedule(schedule: Schedule, micro_batches: int) -> Schedule:
    if micro_batches == schedule.micro_batches:
        return schedule
    return build(schedule.name, schedule.ranks, micro_batches, schedule.stages // schedule.ranks)


def _keep_only(optimizer: Any, kept: set[int]) -> None:
    """Takes the parameters of other stages out of an optimizer; its groups stay, if need be without any."""
    inner = getattr(optimizer, "_optimizer", optimizer)
    for group in inner.param_groups:
        names = group.get("param_names")
        if names is not None:
            group["param_names"] = [n for n, p in zip(names, group["params"], strict=True) if id(p) in kept]
        group["params"] = [p for p in group["params"] if id(p) in kept]


def _writer_of_buffers(
    module: nn.Module, chain: Chain, ranges: Sequence[range], placement: Sequence[int], rank: int
) -> Callable[[str], bool]:
    """Returns whether this rank's stage is the one that moves a module buffer, given its name."""
    last = len(ranges) - 1
    owner, behind = {}, False
    for name in module.state_dict(keep_vars=True):
        index = chain.index_of(name)
        behind = behind or index is not None
        if index is not None:
            owner[name] = next(stage for stage, blocks in enumerate(ranges) if index in blocks)
        else:
            owner[name] = last if behind else 0
    return lambda name: placement[owner.get(name, last)] == rank
