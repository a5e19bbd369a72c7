"""Settles the sizes of batches and the number of processes, which are one equation:

batch of a step = batch of a process x micro-batches x processes (`train_batch_size` = ... of DeepSpeed).
"""

from shardlight.framework.check import BAD
from shardlight.framework.migrate.draft import Draft, Key

_PER_PROCESS = "TrainingArguments.per_device_train_batch_size, 8 where unset"
_PER_STEP = "TrainingArguments.gradient_accumulation_steps, 1 where unset"


def _size(draft: Draft, key: Key | None) -> int | None:
    """A whole number from 1; None where it is not stated, left to transformers, or faulty."""
    if key is None or key.auto or key.value is None:
        return None
    value = draft.number(key, int, 1)
    return None if value is BAD else value


def settle_batches(draft: Draft, *, deepspeed: bool) -> int | None:
    """Writes batch sizes, accumulation and processes; returns the number of processes, where it is known.

    Args:
        deepspeed: whether the source trains through DeepSpeed, which has to know the batch of a process.
    """
    whole_key, micro_key, steps_key = (draft.one(name) for name in ("whole_batch", "micro_batch", "accumulation"))
    whole, micro, steps = _size(draft, whole_key), _size(draft, micro_key), _size(draft, steps_key)
    ranks = _processes(draft)
    if whole_key is not None and whole is not None:
        if steps_key is None and micro is None and ranks is not None:
            steps = 1
        known = [
            (key.name if key else default, value)
            for key, default, value in (
                (micro_key, "", micro),
                (steps_key, "gradient_accumulation_steps", steps),
                (_only(draft, "processes"), "", ranks),
            )
            if value is not None
        ]
        product = 1
        for _, value in known:
            product *= value
        terms = " x ".join(f"{name} {value}" for name, value in known)
        terms = terms if len(known) < 2 else f"{terms} = {product}"
        if len(known) == 3 and product != whole:
            draft.fault(whole_key, f"train_batch_size is {whole}, but {terms}. Make them agree.")
        elif whole % product:
            missing = "processes" if ranks is None else "gradient_accumulation_steps" if steps is None else "samples"
            text = f"train_batch_size is {whole}, but {terms}: no whole number of {missing} makes {whole} of that."
            draft.fault(whole_key, f"{text} Make them agree.")
        elif len(known) == 2:
            if ranks is None:
                ranks = whole // product
                _write_processes(draft, ranks, f"{whole_key}: {whole} / {terms}; on several machines also num_nodes")
            elif micro is None and micro_key is None:
                micro = whole // product
                draft.put("data.batch_size", micro, f"{whole_key}: {whole} / {terms}")
    _lines(draft, (whole_key, whole), (micro_key, micro), (steps_key, steps), deepspeed=deepspeed)
    if "trainer.devices" not in draft.entries:
        draft.leave("trainer.devices", "processes per machine, as the launcher was told (--num_gpus, a hostfile)")
    return ranks


def _lines(
    draft: Draft,
    whole: tuple[Key | None, int | None],
    micro: tuple[Key | None, int | None],
    steps: tuple[Key | None, int | None],
    *,
    deepspeed: bool,
) -> None:
    """Writes the three sizes, each with the line of its key."""
    key, value = whole
    if key is not None and value is not None:
        draft.maps(key, "trainer.global_batch_size", value)
    elif key is not None:
        draft.hint("trainer.global_batch_size", "FILL_IN", f"{key}: may be left out; it is checked where it is set")
        draft.line(key, "differs", '"auto": the product of the others. trainer.global_batch_size may be left out')
    argument = "an argument of your data class, per process"
    key, value = micro
    if key is not None and value is not None:
        draft.maps(key, "data.batch_size", value, argument)
    elif key is not None:
        draft.leave("data.batch_size", f'"auto" in {key}: {_PER_PROCESS}')
        draft.line(key, "differs", f'"auto": {_PER_PROCESS}; left for you, {argument}', "data.batch_size")
    elif deepspeed:
        draft.leave("data.batch_size", "samples per process and micro-batch: the script's own")
    key, value = steps
    if key is not None and value is not None:
        draft.maps(key, "trainer.accumulate_grad_batches", value)
    elif key is not None:
        draft.leave("trainer.accumulate_grad_batches", f'"auto" in {key}: {_PER_STEP}')
        draft.line(key, "differs", f'"auto": {_PER_STEP}; left for you', "trainer.accumulate_grad_batches")


def _only(draft: Draft, name: str) -> Key | None:
    return (draft.facts.get(name) or [None])[0]


def _processes(draft: Draft) -> int | None:
    """`num_processes` and `num_machines` of accelerate: all processes, and machines."""
    total_key, machines_key = draft.one("processes"), draft.one("machines")
    machines = _size(draft, machines_key)
    if machines_key is not None and machines is None and not draft.faults:
        draft.line(machines_key, "none", "not stated: one machine")
    if total_key is None or total_key.value in (-1, None) or total_key.auto:
        total = None
        if total_key is not None:
            draft.leave("trainer.devices", f"{total_key}: processes per machine, as the launcher was told")
            draft.line(total_key, "differs", "the launcher's own number; left for you", "trainer.devices")
    else:
        total = _size(draft, total_key)
    if machines_key is not None and machines is not None:
        if machines > 1:
            draft.put("trainer.num_nodes", machines, machines_key)
        draft.line(machines_key, "maps", "" if machines > 1 else "one machine: the default", "trainer.num_nodes")
    if total_key is None and _alone(draft):
        draft.put("trainer.devices", 1, draft.one("distributed"))
        return 1
    if total_key is None or total is None:
        return None
    if total % (machines or 1):
        text = f"num_processes is {total}, which does not divide into num_machines {machines}. Make them agree."
        draft.fault(total_key, text)
        return None
    per = total // (machines or 1)
    draft.put("trainer.devices", per, total_key)
    text = "per machine here: of all machines there" if (machines or 1) > 1 else ""
    draft.line(total_key, "maps", text, "trainer.devices")
    return total


def _alone(draft: Draft) -> bool:
    """Whether accelerate starts one process where no number is given."""
    kind = draft.one("distributed")
    return kind is not None and str(kind.value).upper() == "NO"


def _write_processes(draft: Draft, ranks: int, why: str) -> None:
    """Processes that follow from the batches, where nothing states them."""
    machines = draft.entries.get("trainer.num_nodes")
    if machines is None:
        draft.put("trainer.devices", ranks, why)
    elif ranks % machines.value == 0:
        draft.put("trainer.devices", ranks // machines.value, why)
