"""The faults that strategies raise; each message says where, what, and the mend."""


class ShardlightError(Exception):
    """Base of every error that this package raises on purpose."""


class StrategyError(ShardlightError):
    """A strategy cannot do what was asked, or was used outside its contract."""


class ScheduleError(StrategyError, ValueError):
    """A pipeline schedule is not possible with these numbers, or its actions cannot be carried out in their order."""


class NoRoomError(StrategyError):
    """A run would take more memory or disk than there is; it was refused before it took any."""


class MeshError(StrategyError):
    """The ranks that were started cannot be arranged as the strategy asks for."""


class GradientError(StrategyError):
    """A gradient is missing, late, or was set behind the engine's back."""


class PipelineError(StrategyError):
    """A model cannot be cut into stages as asked, or a stage would need values that only another stage has."""


class TensorError(StrategyError):
    """A model cannot be cut over the ranks of a tensor group as asked."""


class CollectiveError(ShardlightError):
    """A peer died, did not arrive in time, or is at another operation: usually the consequence of its own error."""


class LaunchError(ShardlightError):
    """The ranks that were started are not the ranks that were asked for."""


class CheckpointError(ShardlightError):
    """A checkpoint cannot be written, or does not fit what it is read into."""
