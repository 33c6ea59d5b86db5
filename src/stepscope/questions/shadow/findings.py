"""What the ranking of modules by their precision shows, in sentences."""

from collections.abc import Iterator, Sequence

from stepscope.core.finding import Finding, note, warning
from stepscope.questions.replays.words import listed, share
from stepscope.questions.shadow.ranked import Ranked, Ranking


def shadow_found(ranking: Ranking) -> Iterator[Finding]:
    """The module that matters most, those that do not matter, and what could not be seen."""
    ran = [each for each in ranking.parts if each.off is not None]
    above = [each for each in ran if not ranking.is_noise(each)]
    yield _headline(ranking, ran, above)
    broken = [each for each in above if not each.finite]
    if broken:
        yield warning(
            "shadow-not-finite",
            f"Not finite is the loss or a gradient with {_names(broken)} alone in {ranking.to}.",
            {"modules": len(broken)},
        )
    if ranking.layers:
        yield _layers(ranking)
    quiet = [each for each in ran if ranking.is_noise(each)]
    if quiet:
        yield note(
            "shadow-noise",
            f"Within noise ({_noise(ranking)}) are the gradients with {_names(quiet)} alone in {ranking.to}.",
            {"modules": len(quiet), "noise": ranking.noise},
        )
    for each in ranking.parts:
        if each.refused:
            yield note("shadow-refused", f"`{each.part.name}` does not run in {ranking.to}: {each.refused}")
    if ranking.idle:
        yield note("shadow-idle", f"Nothing is computed by {_quoted(ranking.idle)}, which stayed as given.")
    if ranking.quiet:
        yield note("shadow-dropout", f"Dropout is off, in {_quoted(ranking.quiet)}: another precision draws others.")
    if ranking.draws:
        yield warning(
            "shadow-dropout",
            "Forward draws random numbers of its own: another precision may draw others, which counts as error here.",
            remedy="give the factory an argument that turns randomness off in forward",
        )


def _headline(ranking: Ranking, ran: list[Ranked], above: list[Ranked]) -> Finding:
    if not ran:
        return warning("shadow", f"No module runs alone in {ranking.to}.")
    if not above:
        return note(
            "shadow",
            f"No module, alone in {ranking.to}, moves the gradients farther than the step again does "
            f"({_noise(ranking)}).",
            {"noise": ranking.noise},
        )
    first = above[0]
    evidence: dict[str, float | int | str | None] = {
        "module": first.part.name, "gradients_off": first.error, "noise": ranking.noise,
        "worst_parameter": first.worst, "worst_off": first.worst_off,
    }  # fmt: skip
    together = f" ({len(first.part.paths)} modules together)" if len(first.part.paths) > 1 else ""
    said = f"`{first.part.name}`{together} is the most sensitive to its precision: alone in {ranking.to} "
    if first.finite:
        said += f"it moves the gradients by {share(first.error)}, those of {first.worst} by {share(first.worst_off)}"
    else:
        said += "it makes them not finite"
    if len(ran) > 1:
        second = ran[1]
        evidence["second"], evidence["second_off"] = second.part.name, second.error
        times = f", {first.error / second.error:.3g} times as far" if 0 < second.error < float("inf") else ""
        said += f"; the next, `{second.part.name}`, by {share(second.error)}{times if first.finite else ''}"
    if ranking.at_once is not None:
        evidence["all_at_once"] = ranking.at_once.error
        said += f". All at once move them by {share(ranking.at_once.error)}" if ranking.at_once.finite else (
            ". All at once make them not finite"
        )  # fmt: skip
    return note("shadow", f"{said}; {_noise(ranking)}.", evidence)


def _layers(ranking: Ranking) -> Finding:
    known = [each for each in ranking.layers if each.off is not None]
    worst, least = max(known, key=lambda each: each.error), min(known, key=lambda each: each.error)
    return note(
        "shadow-layers",
        f"Of its {len(ranking.layers)} layers, one at a time, `{worst.part.name}` moves the gradients farthest, by "
        f"{share(worst.error)}, and `{least.part.name}` least, by {share(least.error)}.",
        {"most": worst.part.name, "most_off": worst.error, "least": least.part.name, "least_off": least.error},
    )


def _noise(ranking: Ranking) -> str:
    return f"the step again moves them by {share(ranking.noise)}" if ranking.noise else (
        "the step again gives the same bits"
    )  # fmt: skip


def _names(ranked: list[Ranked]) -> str:
    return _quoted([each.part.name for each in ranked])


def _quoted(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names])
