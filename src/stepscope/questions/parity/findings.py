"""What the ways to run a step show, in sentences."""

from collections.abc import Iterator, Sequence

from torch import nn

from stepscope.core.finding import Finding, note, warning
from stepscope.questions.parity.departure import Departure, Event
from stepscope.questions.parity.judged import Judged
from stepscope.questions.parity.plain import FACTOR, Plain
from stepscope.questions.replays.subject import drawing_modules
from stepscope.questions.replays.words import listed, share


def parity_found(plain: Plain, quiet: Plain, judged: Sequence[Judged]) -> Iterator[Finding]:
    """What is the same, what is not and why, and what the comparison could not see."""
    ran = [each for each in judged if each.off is not None and each.verdict != "draws anew"]
    departing = [each for each in ran if each.verdict == "departs"]
    if ran:
        yield _headline(ran, departing)
    for each in departing:
        yield _why(each)
    for each in judged:
        if each.verdict == "fails":
            yield warning("variant-fails", f"{each.variant.name} does not run: {each.failure}")
    added = [each for each in ran if each.verdict == "agrees, losses added"]
    if added:
        yield _added(added)
    if plain.draws:
        yield _drawn(plain, quiet, judged)
    yield _rounding(plain)


def place_in_words(departure: Departure) -> str:
    """The module that departs first, or what between modules does, in a few words."""
    event = departure.event
    if event is None:
        return "no module"
    if event.what == "input":
        return f"what goes into {_named(event.module)}"
    return _named(event.module) if event.what == "output" else f"the gradient of {_named(event.module)}"


def _headline(ran: Sequence[Judged], departing: Sequence[Judged]) -> Finding:
    if departing:
        worst = max(departing, key=lambda each: each.times)
        assert worst.off is not None
        names = listed([each.variant.name for each in departing])
        return warning(
            "parity",
            f"{len(departing)} of {len(ran)} ways to run this step do not give what the plain step gives: {names}. "
            f"With {worst.variant.name} {_off(worst)}, where rounding explains {share(worst.plain.gradients)} and "
            f"{share(worst.plain.loss)}.",
            _evidence(worst),
        )
    farthest = max(ran, key=lambda each: each.times)
    assert farthest.off is not None
    if not any(each.off and (each.off.gradients or each.off.loss) for each in ran):
        said = "to the last bit"
    else:
        said = (
            f"within rounding. With {farthest.variant.name} {_off(farthest)}, where rounding moves the plain step's by "
            f"{share(farthest.plain.gradients)} and {share(farthest.plain.loss)}"
        )
    ways = f"All {len(ran)} ways to run this step give" if len(ran) > 1 else "The one way to run this step gives"
    return note("parity", f"{ways} what the plain step gives, {said}.", _evidence(farthest))


def _why(judged: Judged) -> Finding:
    name, parts = judged.variant.name, judged.variant.accumulation
    if judged.empty:
        which = listed([str(each) for each in judged.empty])
        return warning(
            "loss-normalisation",
            f"With {name} the loss is not finite, because no target counts in micro-batch {which}: a mean over none is "
            "0/0.",
            {"accumulation": parts},
            "divide the sum of each micro-batch's loss by the targets of the whole batch",
        )
    if judged.explained:
        return _normalised(judged)
    if judged.departure is None:
        return warning(
            "first-departure", f"With {name} the step departs, and no module can be looked at: hooks make it fail."
        )
    return _first_departure(judged, judged.departure)


def _normalised(judged: Judged) -> Finding:
    explained, off = judged.explained, judged.off
    assert explained is not None and off is not None
    counts, whole = explained.counts, sum(explained.counts)
    numbers = listed([f"{each:,}" for each in counts])
    least, most = counts.index(min(counts)) + 1, counts.index(max(counts)) + 1
    parts = judged.variant.accumulation
    factor = whole / (parts * min(counts))
    return warning(
        "loss-normalisation",
        f"With {judged.variant.name} the loss's normalisation departs: each micro-batch's loss is a mean over its own "
        f"tokens, and the means are averaged, but the micro-batches have {numbers} of the {whole:,} "
        f"{explained.counted}. "
        f"So a token in micro-batch {least} weighs {explained.ratio:.3g} times as much as one in micro-batch {most}, "
        f"and {factor:.3g} times what it weighs in the plain step; the gradients are off by {share(off.gradients)}. "
        f"Weighed by their tokens, the micro-batches give the plain step's gradients to "
        f"{share(explained.off.gradients)}: every module agrees.",
        {
            "accumulation": parts, "tokens": whole, "fewest": min(counts), "most": max(counts),
            "ratio": explained.ratio, "factor": factor, "gradients_off": off.gradients,
            "gradients_off_when_weighed": explained.off.gradients,
        },
        "divide the sum of each micro-batch's loss by the tokens of the whole batch, and add the losses up",
    )  # fmt: skip


def _first_departure(judged: Judged, departure: Departure) -> Finding:
    name, event = judged.variant.name, departure.event
    compiled = judged.variant.compile != "eager"
    if event is None:
        said = (
            f"With {name} all of {departure.compared} tensors that go into modules, come out, and come back as "
            "gradients agree, "
        )
        said += (
            "once the graph is left after each module: the difference is made where operators of several modules are "
            "compiled together."
            if compiled
            else f"and the gradients of parameters do not: {_worst(judged)} is the farthest."
        )
        return warning("first-departure", said, {"compared": departure.compared})
    amount = f"by {share(departure.off)}, where rounding moves it by {share(departure.rounding)}"
    before = ""
    if departure.before and not _has_input(departure):
        before = f" The last that agrees is {_event(departure.before)}."
    remedy = ""
    if event.what == "output":
        said = f"With {name} {_named(event.module)} is the first module to depart: its output is off {amount}"
        said += ", and what goes into it agrees." if _has_input(departure) else "."
        module = _module(judged, event.module)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and judged.variant.accumulation > 1:
            said += (
                f" It is {type(module).__name__} in training mode, whose mean and variance are those of the "
                "micro-batch: it cannot agree."
            )
            remedy = "use a norm that looks at each sample alone, such as GroupNorm, or keep the micro-batch's size"
    elif event.what == "input":
        said = (
            f"With {name} what goes into {_named(event.module)} is the first to depart, {amount}: it is made by the "
            f"code of {_owner(judged, event.module)} itself, outside of its modules."
        )
    elif departure.before is None:
        said = (
            f"With {name} every module's output agrees, and the first gradient that backward makes, that of "
            f"{_named(event.module)}'s output, is off {amount}: the loss departs, by its normalisation or its own code."
        )
    else:
        said = (
            f"With {name} every module's output agrees; in backward the gradient of {_named(event.module)}'s output is "
            f"the first to depart, {amount}."
        )
    evidence = {"off": departure.off, "rounding": departure.rounding, "module": event.module, "what": event.what}
    skipped = (
        f" {departure.skipped} tensors could not be compared: micro-batches do not make them up."
        if departure.skipped and judged.variant.accumulation > 1
        else ""
    )
    return warning("first-departure", said + before + skipped, evidence, remedy)


def _added(added: Sequence[Judged]) -> Finding:
    parts = listed([str(each.variant.accumulation) for each in added])
    return note(
        "summed-loss",
        f"The losses of {parts} micro-batches make up the batch's when they are added up, and not when they are "
        "averaged: the loss is a sum over the micro-batch, divided by nothing or by a number of the whole batch. A "
        "loop that divides by the number of micro-batches makes gradients so many times too small.",
    )


def _drawn(plain: Plain, quiet: Plain, judged: Sequence[Judged]) -> Finding:
    drawing = drawing_modules(plain.setting.step().model)
    who = "Forward draws random numbers"
    if drawing:
        who += f" in dropout ({listed([_named(each) for each in drawing])})"
    if not any(each.variant.accumulation > 1 for each in judged):
        return note("random-forward", f"{who}: each way drew the same numbers, from the same random state.")
    if quiet.draws:
        return warning(
            "random-forward",
            f"{who}, and other micro-batches draw others: whether accumulation agrees cannot be told.",
            remedy="give the factory an argument that turns randomness off in forward",
        )
    return note(
        "random-forward",
        f"{who}, and other micro-batches draw other numbers: accumulation was held against the plain step with both "
        "without dropout, everything else with dropout from the same random state.",
    )


def _rounding(plain: Plain) -> Finding:
    double = plain.moved.get("in float64")
    beside = (
        f"the same step in float64 is {share(double.gradients)} away"
        if double
        else f"float64 cannot say it ({plain.refused.get('in float64', 'it does not run')})"
    )
    said = (
        f"Rounding moves the gradients of the plain step by {share(plain.gradients)} and its loss by "
        f"{share(plain.loss)}: {beside}, and its weights were moved by a rounding, too. What is up to {FACTOR:g} "
        "times as far away counts as the same."
    )
    evidence = {"gradients": plain.gradients, "loss": plain.loss, "factor": FACTOR}
    again = plain.moved["the step again"]
    if again.gradients > 2.0**-10:
        return warning(
            "parity-rounding",
            f"{said} The step again, from the same state, is already {share(again.gradients)} away: it keeps a state, "
            "or draws random numbers that are not PyTorch's, NumPy's or Python's.",
            evidence,
        )
    return note("parity-rounding", said, evidence)


def _off(judged: Judged) -> str:
    """How far a variant is from the plain step, as a clause."""
    assert judged.found is not None and judged.off is not None
    if not judged.found.is_finite:
        return "the loss or a gradient is not finite"
    return f"the gradients are off by {share(judged.off.gradients)} and the loss by {share(judged.off.loss)}"


def _evidence(judged: Judged) -> dict[str, float | int | str | None]:
    assert judged.off is not None
    return {
        "variant": judged.variant.name, "gradients_off": judged.off.gradients, "loss_off": judged.off.loss,
        "rounding_gradients": judged.plain.gradients, "rounding_loss": judged.plain.loss, "times": judged.times,
    }  # fmt: skip


def _module(judged: Judged, path: str) -> nn.Module:
    return judged.plain.setting.step().model.get_submodule(path)


def _has_input(departure: Departure) -> bool:
    event, before = departure.event, departure.before
    return event is not None and before is not None and (before.what, before.module) == ("input", event.module)


def _worst(judged: Judged) -> str:
    assert judged.off is not None
    return judged.plain.alone(judged.off)[0]


def _event(event: Event) -> str:
    of = {"input": "what goes into", "output": "the output of", "gradient": "the gradient of the output of"}
    return f"{of[event.what]} {_named(event.module)}"


def _named(path: str) -> str:
    return f"`{path}`" if path else "the whole model"


def _owner(judged: Judged, path: str) -> str:
    """The module whose code calls another: the one in which it stands, without the lists between them."""
    above = path.rpartition(".")[0]
    while isinstance(_module(judged, above), (nn.ModuleList, nn.ModuleDict)):
        above = above.rpartition(".")[0]
    return _named(above)
