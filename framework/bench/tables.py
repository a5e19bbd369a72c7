"""What a person sees of a benchmark: tables, and the bars."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from shardlight.framework.bench.diff import Comparison
from shardlight.framework.bench.results import UNITS, Bar, Result

Show = Callable[[float], str]

_MB: Show = lambda value: f"{value / 1e6:.1f}"  # noqa: E731
_WHOLE: Show = lambda value: f"{value:,.0f}"  # noqa: E731
_ONE: Show = lambda value: f"{value:.1f}"  # noqa: E731

TIME: list[tuple[str, str, Show]] = [
    ("step ms", "step_ms", _ONE),
    ("x", "step_ratio", lambda value: f"{value:.2f}"),
    ("tokens/s", "tokens_per_s", _WHOLE),
    ("CPU ms, all ranks", "cpu_ms", _ONE),
    ("page faults", "page_faults", _WHOLE),
    ("Python calls", "python_calls", _WHOLE),
    ("start-up s", "startup_s", _ONE),
    ("loss difference", "loss_difference", lambda value: f"{value:.1e}"),
]
BYTES: list[tuple[str, str, Show]] = [
    ("peak MB", "peak_memory_bytes", _MB),
    ("steady MB", "steady_memory_bytes", _MB),
    ("counted state MB", "state_bytes", _MB),
    ("of the table MB", "table_state_bytes", _MB),
    ("counted sent MB", "sent_bytes", _MB),
    ("of the table MB ", "table_sent_bytes", _MB),
    ("loopback MB, all ranks", "loopback_bytes", _MB),
    ("collectives", "collectives, sends, receives", _WHOLE),
]
_SMALL: Show = lambda value: f"{value:.1e}" if value else "0"  # noqa: E731
GPU: list[tuple[str, str, Show]] = [
    ("error / allowed", "error_ratio", lambda value: f"{value:.2f}"),
    ("bytes not the CPU's", "bytes_apart", _WHOLE),
    ("loss apart", "loss_apart", _SMALL),
    ("weights apart", "weights_apart", _SMALL),
    ("state MB", "state_bytes", _MB),
    ("of the table MB", "table_state_bytes", _MB),
    ("steady MB", "steady_allocated_bytes", _MB),
    ("peak MB", "peak_allocated_bytes", _MB),
    ("us", "call_us", _ONE),
    ("GB/s", "buffer_bytes_per_s", lambda value: f"{value / 1e9:.1f}"),
]
CHECKPOINT: list[tuple[str, tuple[str, ...], Show]] = [
    ("ms", ("save_ms", "load_ms"), _WHOLE),
    ("x plain writes, x same shape", ("time_to_raw", "time_to_same"), lambda value: f"{value:.2f}"),
    ("CPU ms, all ranks", ("cpu_ms",), _WHOLE),
    ("of it checksums", ("checksum_cpu_share",), lambda value: f"{100 * value:.0f}%"),
    ("to verify alone, ms", ("verify_ms",), _WHOLE),
    ("extra MB", ("peak_memory_bytes",), _MB),
    ("MB on disk", ("written_bytes",), _MB),
]
_TWO: Show = lambda value: f"{value:.2f}"  # noqa: E731
_THREE: Show = lambda value: f"{value:.3f}"  # noqa: E731
INFINITY: list[tuple[str, str, Show]] = [
    ("ends as", "over_cap", lambda value: "oom" if value else "trained"),
    ("peak MB", "sampled_peak_bytes", _MB),
    ("of allowed", "cap_share", _TWO),
    ("loss, first", "first_loss", _THREE),
    ("last", "last_loss", _THREE),
    ("step ms", "step_ms", _WHOLE),
    ("compute", "compute_ms", _WHOLE),
    ("waits for disk", "disk_wait_ms", _WHOLE),
    ("for ranks", "rank_wait_ms", _WHOLE),
    ("CPU ms, all ranks", "cpu_ms", _WHOLE),
    ("disk MB: gathers", "gathers_disk_bytes", _MB),
    ("parameters", "parameters_disk_bytes", _MB),
    ("gradients", "gradients_disk_bytes", _MB),
    ("optimizer", "optimizer_disk_bytes", _MB),
    ("loss difference", "loss_difference", lambda value: f"{value:.1e}"),
]
_PERCENT: Show = lambda value: f"{100 * value:.1f}%"  # noqa: E731
PIPELINE: list[tuple[str, str, Show]] = [
    ("step ms", "step_ms", _ONE),
    ("x", "step_ratio", _TWO),
    ("forwards and backwards ms", "pipeline_ms", _ONE),
    ("the simulator's ms", "theory_ms", _ONE),
    ("bubble", "bubble", _PERCENT),
    ("the simulator's", "theory_bubble", _PERCENT),
    ("CPU ms, all ranks", "cpu_ms", _ONE),
    ("page faults", "page_faults", _WHOLE),
    ("Python calls", "python_calls", _WHOLE),
    ("activations MB", "activation_bytes", _MB),
    ("loopback MB", "loopback_bytes", _MB),
    ("loss difference", "loss_difference", lambda value: f"{value:.1e}"),
]
WITHOUT = "-"


def _table(result: Result, title: str, names: list[str], columns: list[tuple[str, str, Show]]) -> Table | None:
    """A row a contender; columns that nobody has are left out. None: nothing was measured."""
    columns = [c for c in columns if any(result.value(name, c[1]) is not None for name in names)]
    if not columns or not names:
        return None
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("contender", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for name in names:
        cells = []
        for _, metric, show in columns:
            value = result.value(name, metric)
            text = WITHOUT if value is None else show(value)
            if metric == "step_ratio" and (found := result.intervals.get(name)) is not None:
                text += f" [{found[0]:.2f}, {found[1]:.2f}]"
            cells.append(text)
        table.add_row(name, *cells)
    return table


def tables(result: Result) -> list[RenderableType]:
    """Returns the tables, the bars and the notes of a result, in the order shown."""
    names = list(dict.fromkeys(row.who for row in result.rows if " rank " not in row.who))
    bare = [name for name in names if not name.startswith("trainer-")]
    trained = [name for name in names if name.startswith("trainer-")]
    size = result.machine["size"]
    found = [
        _table(result, f"zero, {size}: a step in the bare loop (x: times DDP's)", bare, TIME),
        _table(result, f"zero, {size}: memory and traffic of a rank, a step", bare, BYTES),
        _table(result, f"zero, {size}: under Lightning's Trainer (x: times the bare loop's)", trained, TIME),
    ]
    made: list[RenderableType] = [table for table in found if table is not None]
    if result.bars:
        made.append(bars_table(result.bars))
    made += [Text(note) for note in result.notes]
    made.append(_machine(result))
    return made


def _machine(result: Result) -> Text:
    machine = result.machine
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("python", "torch", "lightning", "deepspeed") if machine[name]
    )
    return Text(f"{machine['processor']}, {machine['cores']} cores; {versions}")


def tables_of_collectives(result: Result) -> list[RenderableType]:
    """The same for the benchmark `collectives`."""
    title = f"collectives of {result.machine['ranks']} ranks: a call (GB/s: bytes of the whole buffer)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("collective", "by", "time", "GB/s", "x gloo", "x memcpy"):
        table.add_column(heading, justify="left" if heading in ("collective", "by") else "right")
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in result.rows:
        if " rank " not in row.who:
            found.setdefault((row.case, row.who), {})[row.metric] = row.value
    shown = ""
    for (case, who), figures in found.items():
        time_us = figures["call_us"]
        time = f"{time_us:.1f} us" if time_us < 1000 else f"{time_us / 1000:.2f} ms"
        found_ratios = (figures.get(metric) for metric in ("speed_to_gloo", "speed_to_memcpy"))
        ratios = (WITHOUT if ratio is None else f"{ratio:.2f}" for ratio in found_ratios)
        table.add_row(case if case != shown else "", who, time, f"{figures['buffer_bytes_per_s'] / 1e9:.3f}", *ratios)
        shown = case
    return [table, bars_table(result.bars), *(Text(note) for note in result.notes), _machine(result)]


def tables_of_gpu(result: Result) -> list[RenderableType]:
    """The same for the benchmark `gpu`: one table of figures, a check a row."""
    made: list[RenderableType] = []
    if result.rows:
        table = Table(title=f"on {result.machine['device']}", title_justify="left", box=None, pad_edge=False)
        found: dict[tuple[str, str], dict[str, float]] = {}
        for row in result.rows:
            found.setdefault((row.case, row.who), {})[row.metric] = row.value
        columns = [c for c in GPU if any(c[1] in figures for figures in found.values())]
        for heading in ("check", "of", *(heading for heading, _, _ in columns)):
            table.add_column(heading, justify="left" if heading in ("check", "of") else "right", no_wrap=True)
        shown = ""
        for (case, who), figures in found.items():
            cells = (show(figures[m]) if m in figures else WITHOUT for _, m, show in columns)
            table.add_row(case if case != shown else "", who, *cells)
            shown = case
        # Of those that hold, only the ones that are a matter of degree.
        shown_bars = [bar for bar in result.bars if not bar.holds or bar.pairs > 1]
        held = sum(bar.holds is True for bar in result.bars)
        made += [table, Text(f"{held} of {len(result.bars)} bars hold."), bars_table(shown_bars)]
    return [*made, *(Text(note) for note in result.notes), _machine(result)]


def tables_of_ops(result: Result) -> list[RenderableType]:
    """The same for the benchmark `ops`."""
    title = f"ops: a step over {result.machine['numel']:,} elements"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("case", "by", "time", "GB/s", "x the same traffic"):
        table.add_column(heading, justify="left" if heading in ("case", "by") else "right")
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in result.rows:
        if " rank " not in row.who:
            found.setdefault((row.case, row.who), {})[row.metric] = row.value
    shown = ""
    for (case, who), figures in found.items():
        if "call_us" in figures:
            speed = figures["buffer_bytes_per_s"] / 1e9
            cells = [f"{figures['call_us'] / 1000:.2f} ms", f"{speed:.2f}", f"{figures['speed_to_traffic']:.2f}"]
        else:
            ((metric, value),) = figures.items()
            cells = [f"{value:.2f} {UNITS[metric]}", WITHOUT, WITHOUT]
        table.add_row(case if case != shown else "", who, *cells)
        shown = case
    return [table, bars_table(result.bars), *(Text(note) for note in result.notes), _machine(result)]


def tables_of_checkpoint(result: Result) -> list[RenderableType]:
    """The same for the benchmark `checkpoint`."""
    table = Table(title=f"checkpoint, {result.machine['size']}", title_justify="left", box=None, pad_edge=False)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in result.rows:
        if " rank " not in row.who:
            found.setdefault((row.case, row.who), {})[row.metric] = row.value
    headings = [heading for heading, _, _ in CHECKPOINT]
    for heading in ("case", "by", *headings):
        table.add_column(heading, justify="left" if heading in ("case", "by") else "right", no_wrap=True)
    shown = ""
    for (case, who), figures in found.items():
        cells = []
        for _, metrics, show in CHECKPOINT:
            values = [figures[metric] for metric in metrics if metric in figures]
            cells.append(show(values[0]) if values else WITHOUT)
        table.add_row(case if case != shown else "", who, *cells)
        shown = case
    return [table, bars_table(result.bars), *(Text(note) for note in result.notes), _machine(result)]


def tables_of_infinity(result: Result) -> list[RenderableType]:
    """The same for the benchmark `infinity`: a table for each part."""
    return _by_part(result, lambda part: f"infinity, {result.machine['size']}: {part} (of a rank, of a step)", INFINITY)


def tables_of_pipeline(result: Result) -> list[RenderableType]:
    """The same for the benchmark `pipeline`."""
    return _by_part(result, lambda part: f"pipeline, {part} (x: times shardlight-1f1b's)", PIPELINE)


def _by_part(result: Result, title: Callable[[str], str], columns: list[tuple[str, str, Show]]) -> list[RenderableType]:
    made: list[RenderableType] = []
    for part in dict.fromkeys(row.case for row in result.rows):
        rows = [row for row in result.rows if row.case == part]
        names = list(dict.fromkeys(row.who for row in rows if " rank " not in row.who))
        table = _table(replace(result, rows=rows), title(part), names, columns)
        made += [] if table is None else [table]
    made.append(bars_table(result.bars))
    return [*made, *(Text(note) for note in result.notes), _machine(result)]


def bars_table(bars: list[Bar]) -> Table:
    """The bars, those that fall short marked."""
    table = Table(title="bars", title_justify="left", box=None, pad_edge=False)
    for heading in ("bar", "value", "interval", "pairs", "target", "holds"):
        table.add_column(heading, justify="left" if heading in ("bar", "holds") else "right")
    for bar in bars:
        value = WITHOUT if bar.value is None else f"{bar.value:,.3f}"
        interval = WITHOUT if bar.interval is None else f"{bar.interval[0]:,.3f} to {bar.interval[1]:,.3f}"
        holds = (
            Text(f"not measured: {bar.reason}") if bar.holds is None else Text("yes" if bar.holds else "FALLS SHORT")
        )
        if bar.holds is False:
            holds.stylize("bold red")
        table.add_row(bar.name, value, interval, str(bar.pairs or WITHOUT), bar.target, holds)
    return table


def comparison(found: Comparison) -> list[RenderableType]:
    """Returns what changed between two results, in the order shown."""
    made: list[RenderableType] = [Text(f"Other machine or versions: {text}") for text in found.machines]
    for worse, title in ((True, "worse"), (False, "better")):
        changes = [change for change in found.changes if change.worse == worse]
        if not changes:
            made.append(Text(f"Nothing is {title} by more than noise."))
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in ("case", "contender", "metric", "old", "new", "x"):
            table.add_column(heading, justify="left" if heading in ("case", "contender", "metric") else "right")
        for c in changes:
            table.add_row(c.case, c.who, c.metric, f"{c.old:,.6g}", f"{c.new:,.6g}", f"{c.factor:.3f}")
        made.append(table)
    made += [Text(f"Bar: {text}") for text in found.bars]
    for title, names in (("old", found.only_old), ("new", found.only_new)):
        if names:
            made.append(Text(f"Only in {title}: {', '.join(names)}"))
    made.append(Text(f"{found.compared} figures compared."))
    return made
