"""`stepscope study underflow`, `scaling` and `swallowed`: gradients and updates in 16 bits."""

from stepscope.cli.given_options import refuse_beside
from stepscope.cli.studies.answering import study_verb
from stepscope.cli.workloads import factory_arguments, own_model
from stepscope.core.answer import Answer
from stepscope.core.model_config import configure


@study_verb(
    "underflow",
    "stepscope study underflow --model small --save underflow.svg",
    "stepscope study underflow --from results/h200/precision/underflow.json --only 'by format'",
)
def underflow(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, vocabulary: int | None, batch_size: int = 1,
    seq_len: int = 64, seed: int, format: str, device: str,
) -> Answer:  # fmt: skip
    """The exponents of a training step's gradients against each format, without and with a loss scale."""
    own = own_model(module, model)
    arguments = factory_arguments(own, arg)
    if own is not None:
        from stepscope.studies.of_own_model import UNDERFLOW, answer_of_own

        refuse_beside("--module" if module else "--model", "--arg", "--seed", "--format")
        return answer_of_own(UNDERFLOW, own, arguments, seed=seed, format_name=format, device=device)
    from stepscope.numerics.gradients.underflow import study_underflow

    sizes = configure(model or "tiny", vocabulary=vocabulary)
    return study_underflow(
        model=sizes, batch_size=batch_size, seq_len=seq_len, format_name=format, device=device, seed=seed
    )


@study_verb(
    "scaling",
    "stepscope study scaling --steps 100 --overflow-at 7,8,60",
    "stepscope study scaling --from results/h200/precision/scaling.json --only findings",
)
def scaling(
    *, steps: int = 200, growth_interval: int, overflow_at: tuple[int, ...] | None, seed: int, device: str
) -> Answer:
    """A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler."""
    from stepscope.numerics.gradients.scaling import study_scaling

    return study_scaling(steps=steps, growth_interval=growth_interval, planted=overflow_at, device=device, seed=seed)


@study_verb(
    "swallowed",
    "stepscope study swallowed --learning-rate 1e-4,1e-3",
    "stepscope study swallowed --from results/cpu/precision/swallowed.json --save swallowed.svg",
)
def swallowed(
    *, model: str = "tiny", d_model: int = 64, d_ff: int = 256, layers: int = 2, vocabulary: int = 256,
    batch_size: int = 4, seq_len: int = 32, seed: int, steps: int = 40,
    learning_rate: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2), remedies_at: float, device: str,
) -> Answer:  # fmt: skip
    """Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside fp32."""
    from stepscope.numerics.gradients.swallowed import study_swallowed

    sizes = configure(model, d_model=d_model, d_ff=d_ff, layers=layers, vocabulary=vocabulary)
    return study_swallowed(
        model=sizes, steps=steps, learning_rates=learning_rate, remedies_at=remedies_at, batch_size=batch_size,
        seq_len=seq_len, device=device, seed=seed,
    )  # fmt: skip
