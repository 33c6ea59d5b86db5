"""`stepscope study NAME`: questions with an answer of their own."""

from typing import Any, ClassVar

from stepscope.app.cli.verb import Verbs, say_spelling
from stepscope.core.options import Verb

_OLD_MODES = {"--gate": "attention-gate", "--model": "attention-step"}
"""Options of `study attention` that made another study of it: verbs of their own now."""


class _Studies(Verbs):
    """The studies, each a verb."""

    verbs: ClassVar = {
        "warmup": (
            "stepscope.questions.warmup:QUESTION",
            "Measure a step after 0, 1, 2 and 5 warm-up steps, each in a fresh process.",
        ),
        "allocator": (
            "stepscope.questions.allocator:QUESTION",
            "Measure a step without a setting of the GPU's caching allocator and with it, each in a process of its "
            "own.",
        ),
        "kernels": (
            "stepscope.questions.kernels:QUESTION",
            "Kernels by phase, their share, softmax and the rest, over models and sequence lengths.",
        ),
        "compile": (
            "stepscope.questions.compile:QUESTION",
            "What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it "
            "fused.",
        ),
        "formats": (
            "stepscope.questions.formats:QUESTION",
            "Range, precision and codes of every number format, from its bits; and what formats of blocks make of a "
            "block.",
        ),
        "accumulation": (
            "stepscope.questions.accumulation:QUESTION",
            "Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why.",
        ),
        "normalisation": (
            "stepscope.questions.normalisation:QUESTION",
            "RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe "
            "way.",
        ),
        "softmax": (
            "stepscope.questions.softmax:QUESTION",
            "Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow.",
        ),
        "underflow": (
            "stepscope.questions.one_model:UNDERFLOW",
            "The exponents of a training step's gradients against each format, without and with a loss scale.",
        ),
        "scaling": (
            "stepscope.questions.one_model:SCALING",
            "A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler.",
        ),
        "swallowed": (
            "stepscope.questions.one_model:SWALLOWED",
            "Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside "
            "fp32.",
        ),
        "autocast": (
            "stepscope.questions.one_model:AUTOCAST",
            "The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator.",
        ),
        "parity": (
            "stepscope.questions.one_model:PARITY",
            "Whether one step gives the same loss and gradients in other micro-batches, compiled, checkpointed, or "
            "with another attention; and which module departs first where it does not. What is asked for is "
            "compared, or all that can be.",
        ),
        "shadow": (
            "stepscope.questions.one_model:SHADOW",
            "Which module's precision matters: the step again with one module at a time in 16 bits, ranked by the "
            "error that this makes in the gradients, beside run-to-run noise. Of blocks: which format, recipe, "
            "product, layer.",
        ),
        "speed": (
            "stepscope.questions.speed:QUESTION",
            "How much faster lower precision is by the model's size, and which part of the step makes the gain.",
        ),
        "quality": (
            "stepscope.questions.quality:QUESTION",
            "A small transformer trained on real text in every precision: quality, and the step at which a run "
            "departs.",
        ),
        "attention": (
            "stepscope.questions.attention:QUESTION",
            "Attention by each implementation: right or wrong, time, memory and TFLOP/s by sequence length and "
            "head_dim.",
        ),
        "attention-step": (
            "stepscope.questions.attention_step:QUESTION",
            "A whole training step with each attention in it: time, memory, and where the difference comes from.",
        ),
        "attention-gate": (
            "stepscope.questions.attention_gate:QUESTION",
            "Whether each implementation of attention is right: every dtype and shape, judged by float64.",
        ),
        "collectives": (
            "stepscope.questions.collectives:QUESTION",
            "Time, bandwidth and latency of all-reduce, all-gather, reduce-scatter, all-to-all, broadcast and send, "
            "by size.",
        ),
        "parallel": (
            "stepscope.questions.parallel:QUESTION",
            "Strategies that share a step, beside one process and one another: step, communication, memory, scaling.",
        ),
    }

    @staticmethod
    def verb_of(registered: Any) -> Verb:
        """The verb of the question that a line of the table names."""
        from stepscope.app.cli.questions import verb_of

        return verb_of(registered)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = args[1 : args.index("--")] if "--" in args else args[1:]
        mode = next((name for name in (arg.partition("=")[0] for arg in options) if name in _OLD_MODES), None)
        if args[:1] == ["attention"] and mode is not None:
            say_spelling(f"study attention {mode}", f"study {_OLD_MODES[mode]}")
            args = [_OLD_MODES[mode], *(arg for arg in args[1:] if arg != "--gate")]
        return super().parse_args(ctx, args)


app = _Studies(name="study", help="Studies: one question each.", no_args_is_help=True)
