"""The category of each allocation where nobody noted it, and how it is known.

`sure` says by what: the stack or range of the allocation, its lifetime across phases, its size, or nothing (a guess).
"""

from functools import reduce
from math import gcd
from typing import Literal, get_args

import polars as pl

from stepscope.allocations.stacks import NO_STACK, Sign
from stepscope.core.memory_notes import CATEGORIES
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTATION

Certainty = Literal["stack", "lifetime", "size", "guess"]
"""By what a category is known, the surest first."""
CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)

THERE_BEFORE = "there before"
QUANTISED = "frozen quantised weights"
_STATES_AT_MOST = 2
"""How many tensors of a parameter's size Adam and AdamW keep for each parameter."""
_WORKSPACES = (2 * 4096 * 1024 + 8 * 16 * 1024,)
"""What cuBLAS is given to work in, by PyTorch's default before Hopper (:4096:2:16:8); no tensor's usual size."""
_TOLD_BY_SIZE = 0.97
"""The share of what was there throughout whose sizes must agree on how many tensors belong to each parameter."""


def stage_of(phase: pl.Expr) -> pl.Expr:
    """The stage of training that a phase's name tells: forward, backward, optimizer, or ''."""
    return (
        pl.when(phase == FORWARD)
        .then(pl.lit(FORWARD))
        .when(phase.is_in([BACKWARD, RECOMPUTATION]))
        .then(pl.lit(BACKWARD))
        .when((phase == OPTIMIZER) | phase.str.starts_with("Optimizer.step#"))
        .then(pl.lit(OPTIMIZER))
        .otherwise(pl.lit(""))
    )


def by_evidence(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The table with the columns `category` and `sure`, and a remark on what was there throughout.

    Reads alloc_event (null: before the history), free_event (null: never), stage, free_stage, span, free_span (the
    index of the phase, since several phases may have one name), signs, free_signs, requested, address.
    """
    table, said = _by_size(_by_lifetime(_with_turns(table)))
    return table.drop("turn", "free_turn", "passes", "free_passes"), said


def certainty_of(alive: pl.DataFrame) -> dict[str, dict[Certainty, int]] | None:
    """By category the bytes asked for, by how the category is known; None where the process noted what they were."""
    if "sure" not in alive.columns:
        return None
    held = dict[tuple[str, Certainty], int]()
    for category, how, count in alive.group_by("category", "sure").agg(pl.col("requested").sum()).iter_rows():
        held[category, how] = count
    categories = [category for category in CATEGORIES if any(of == category for of, _ in held)]
    return {
        category: {how: held[category, how] for how in CERTAINTIES if (category, how) in held}
        for category in categories
    }


def _with_turns(table: pl.DataFrame) -> pl.DataFrame:
    """The table with the place of each event in the order of stages, counted in turns: forward, backward, optimizer,
    forward, ... Columns: `turn`, `free_turn`, and how many backward passes had begun by then (`passes`, `free_passes`).
    A free whose stage nothing tells happened in the stage whose turn it was.
    """
    changes = (
        table.filter(pl.col("alloc_event").is_not_null() & (pl.col("stage") != ""))
        .select(event="alloc_event", running="stage")
        .sort("event")
        .filter((pl.col("running") != pl.col("running").shift(1)).fill_null(True))
        .with_columns(
            running_turn=pl.int_range(1, pl.len() + 1, dtype=pl.Int64),
            running_passes=(pl.col("running") == BACKWARD).cum_sum().cast(pl.Int64),
        )
    )

    def looked_up(column: str) -> pl.DataFrame:
        """Stage, turn and passes at each row's event of a column; of the last event where it never came."""
        wanted = table.select(event=pl.col(column)).with_row_index("row").filter(pl.col("event").is_not_null())
        found = wanted.sort("event").join_asof(changes, on="event", check_sortedness=False)
        return table.select().with_row_index("row").head(0) if not table.height else (
            pl.DataFrame({"row": pl.int_range(table.height, eager=True, dtype=pl.UInt32)})
            .join(found.drop("event"), on="row", how="left", maintain_order="left")
        )  # fmt: skip

    if not table.height:
        empty = pl.lit(0, dtype=pl.Int64)
        return table.with_columns(turn=empty, free_turn=empty, passes=empty, free_passes=empty)
    made, freed = looked_up("alloc_event"), looked_up("free_event")
    never = pl.col("free_event").is_null()
    last_turn, all_passes = changes.height + 1, int((changes["running"] == BACKWARD).sum())
    return table.with_columns(
        turn=made["running_turn"].fill_null(0),
        passes=made["running_passes"].fill_null(0),
        free_turn=pl.when(never).then(last_turn).otherwise(freed["running_turn"].fill_null(0)),
        free_passes=pl.when(never).then(all_passes).otherwise(freed["running_passes"].fill_null(0)),
        free_stage=pl.when(never | (pl.col("free_stage") != ""))
        .then(pl.col("free_stage"))
        .otherwise(freed["running"].fill_null("")),
    )


def _by_lifetime(table: pl.DataFrame) -> pl.DataFrame:
    """The table with a category by stack and lifetime. The first rule that fits decides."""
    before, never = pl.col("alloc_event").is_null(), pl.col("free_event").is_null()
    stage, freed_in = pl.col("stage"), pl.col("free_stage")
    zeroed = _has("free_signs", Sign.ZERO_GRAD)
    outlives = never | (pl.col("turn") != pl.col("free_turn"))
    next_span = (pl.col("span") != pl.col("free_span")) & (pl.col("span") >= 0)
    passes = pl.col("passes").max()
    kept = (pl.col("free_passes") > pl.col("passes")) & (~never | (pl.col("passes") == passes - 1))
    unfinished = never & (pl.col("passes") == passes) & (passes > 0)
    made_as_model = never & (stage != BACKWARD) & (stage != OPTIMIZER) & ~_has("signs", Sign.CALL)
    rules: list[tuple[pl.Expr, str, Certainty]] = [
        (_has("signs", Sign.WORKSPACE), "workspaces", "stack"),
        (never & pl.col("requested").is_in(_WORKSPACES), "workspaces", "size"),
        (made_as_model & _has("signs", Sign.QUANTISED), QUANTISED, "stack"),
        (made_as_model & _has("signs", Sign.MODEL), "parameters", "stack"),
        (before & never & (stage == OPTIMIZER), "optimizer state", "stack"),
        (before & never & (stage == BACKWARD), "gradients", "stack"),
        (before & never, THERE_BEFORE, "guess"),
        (before & (freed_in == BACKWARD), "saved for backward", "lifetime"),
        (before & zeroed, "gradients", "stack"),
        (before & (freed_in == OPTIMIZER), "optimizer state", "lifetime"),
        (before, THERE_BEFORE, "guess"),
        ((stage == OPTIMIZER) & (outlives | next_span), "optimizer state", "stack"),
        ((stage == BACKWARD) & zeroed, "gradients", "stack"),
        ((stage == BACKWARD) & (outlives | (freed_in == OPTIMIZER)), "gradients", "lifetime"),
        (_has("free_signs", Sign.AUTOCAST_EXIT), "cast copies", "stack"),
        ((stage == FORWARD) & (freed_in == BACKWARD), "saved for backward", "lifetime"),
        ((stage == FORWARD) & kept, "saved for backward", "lifetime"),
        ((stage == FORWARD) & unfinished, "saved for backward", "guess"),
        ((stage != "") & ~outlives, "temporaries", "lifetime"),
    ]
    return table.with_columns(
        category=_first_of(rules, 1, "temporaries"),
        sure=_first_of(rules, 2, "guess"),
    )


def _first_of(rules: list[tuple[pl.Expr, str, Certainty]], which: int, otherwise: str) -> pl.Expr:
    """The category or certainty of the first rule that fits."""
    return pl.coalesce([pl.when(rule[0]).then(pl.lit(rule[which])) for rule in rules] + [pl.lit(otherwise)])


def _has(column: str, sign: Sign) -> pl.Expr:
    return (pl.col(column) & int(sign)) != 0


def _by_size(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The table with categories by size for what stays throughout, and a remark on it.

    Where the history has gradients, as many tensors of each size are parameters as gradients of that size ever live
    together. The history may show no optimizer state, since it is updated in place: the ratio of residents to
    gradients tells how many states each parameter has. Without gradients, states that a stack tells say as much, and
    else the sizes themselves: with Adam there are three tensors of each parameter's size, or four where the gradients
    stay too. Among equal tensors the choice makes no difference to the sums; those made in a function named `step`
    are the last to be called parameters.
    """
    before, never = pl.col("alloc_event").is_null(), pl.col("free_event").is_null()
    resident = before & never & (pl.col("category") == THERE_BEFORE)
    made = ~before & never & (pl.col("stage") == FORWARD) & (pl.col("passes") == 0) & (pl.col("sure") != "stack")
    if not table.select((resident | made).any()).item():
        return table, ""
    is_known = never & (pl.col("category") == "parameters")
    is_told = pl.col("category") == "optimizer state"
    sizes = _gradients_together(table)
    gradients_stay = False
    states = 0
    if sizes.height:
        counted = table.filter(resident | is_known).join(sizes, on="requested")
        per_gradient = int(counted["requested"].sum()) / int((sizes["requested"] * sizes["count"]).sum())
        if not table.select((is_told & ~(before & never)).any()).item():
            states = min(max(int(per_gradient + 0.1) - 1, 0), _STATES_AT_MOST)
        said = "as much is called parameters as there are gradients of the same sizes"
    elif table.select((is_told & never).any()).item():
        sizes = _states_of_a_line(table.filter(is_told & never))
        said = "as much is called parameters as one line of the optimizer keeps states of the same sizes"
    else:
        staged = bool((table["stage"] != "").any())
        trains = is_known | pl.any_horizontal(pl.col("stage", "free_stage").is_in([BACKWARD, OPTIMIZER]))
        if (table["stack"] != NO_STACK).any() and not table.select(trains.any()).item():
            # Stacks of inference: layers of one size would pass for a parameter and its states.
            return table, "Nothing in this history shows a training step: what was there before it is called so."
        usual = (4, 3, 2) if table.select((pl.col("passes") > 1).any()).item() else (3,) if staged else (4, 3)
        sizes, copies = _alike(table.filter(resident | is_known), usual)
        gradients_stay = len(usual) > 1 and (staged or copies == _STATES_AT_MOST + 2)
        if not copies:
            return table, "Nothing in this history tells apart what was there before it: it is called so."
        states = copies - 1 - gradients_stay
        said = f"{copies} tensors of each size belong to a parameter"
        said += ", its gradient among them" if gradients_stay else ""
    in_step = _has("signs", Sign.STEP)
    order = [in_step, before.not_(), "alloc_event", "address"]
    place = pl.int_range(pl.len()).over("requested", "candidate", order_by=order)
    known = is_known.sum().over("requested")
    table = table.with_columns(candidate=resident | made, known=known).with_columns(place=place)
    table = table.join(sizes, on="requested", how="left", maintain_order="left")
    candidate, at = pl.col("candidate"), pl.col("place")
    of_size = pl.col("count").fill_null(0)
    count = (of_size - pl.col("known")).clip(lower_bound=0)
    is_parameter = candidate & (at < count)
    others = count + of_size * states
    is_state = resident & (at >= count) & (at < others)
    is_state |= ~before & never & in_step & ~is_parameter & pl.col("count").is_not_null() & (pl.col("sure") != "stack")
    is_gradient = resident & (at >= others) & (at < others + of_size * gradients_stay)
    was_gradient = before & ~never & (pl.col("category") == THERE_BEFORE) & (of_size > 0)
    found: list[tuple[pl.Expr, str]] = [
        (is_parameter, "parameters"),
        (is_state, "optimizer state"),
        (is_gradient | was_gradient, "gradients"),
    ]
    table = table.with_columns(
        category=pl.coalesce([pl.when(rule).then(pl.lit(name)) for rule, name in found] + [pl.col("category")]),
        sure=pl.when(is_parameter | is_state | is_gradient | was_gradient)
        .then(pl.lit("size"))
        .otherwise(pl.col("sure")),
    ).drop("place", "count", "candidate", "known")
    told = {1: ", once as much optimizer state", 2: ", twice as much optimizer state (Adam's)"}.get(states, "")
    rest = f'the rest (buffers and batches among it) is called "{THERE_BEFORE}"'
    return table, f"Of what was there throughout, {said}{told}; {rest}."


def _states_of_a_line(states: pl.DataFrame) -> pl.DataFrame:
    """By size (`requested`), the most states of it that one line of code made (`count`): one for each parameter."""
    of_line = states.filter(pl.col("requested") > 0).group_by("requested", "site").agg(count=pl.len().cast(pl.Int64))
    return of_line.group_by("requested").agg(pl.col("count").max())


def _gradients_together(table: pl.DataFrame) -> pl.DataFrame:
    """By size (`requested`), how many gradients of it ever live at one time (`count`). What has no bytes tells none."""
    gradients = table.filter((pl.col("category") == "gradients") & (pl.col("requested") > 0))
    changes = pl.concat(
        [
            gradients.select("requested", event=pl.col("alloc_event").fill_null(-1), change=pl.lit(1)),
            gradients.filter(pl.col("free_event").is_not_null()).select(
                "requested", event=pl.col("free_event"), change=pl.lit(-1)
            ),
        ]
    )
    return (
        changes.sort("event", "change")
        .group_by("requested")
        .agg(count=pl.col("change").cum_sum().max().cast(pl.Int64))
        .filter(pl.col("count") > 0)
    )


def _alike(residents: pl.DataFrame, usual: tuple[int, ...]) -> tuple[pl.DataFrame, int]:
    """How many parameters of each size there are (`requested`, `count`), and how many tensors each has of its size,
    itself included: one of the usual numbers, or 0 where the sizes do not tell.

    A model with an embedding or a last norm of a size of its own has one such parameter. So the greatest number that
    divides how often each size comes is how many tensors belong to a parameter.
    """
    by_size = residents.group_by("requested").len("count").with_columns(bytes=pl.col("requested") * pl.col("count"))
    by_size = by_size.sort("bytes", "requested", descending=True)
    told = _TOLD_BY_SIZE * int(by_size["bytes"].sum())
    large = by_size.filter(pl.col("bytes").cum_sum() - pl.col("bytes") < told)
    common = reduce(gcd, large["count"].to_list(), 0)
    copies = next((number for number in usual if common and common % number == 0), 0)
    counts = by_size.select("requested", pl.col("count") // max(copies, 1)).filter(pl.col("count") > 0)
    return counts, copies
