"""The questions of Stanford CS336, assignment 2 (systems)."""

from stepscope.questions import parallel as ranks
from stepscope.rendering.writeup.document import Assignment, Measure, Part, Question
from stepscope.rendering.writeup.sources import (
    PLAIN,
    arithmetic_of_peak,
    attention_steps,
    compiled,
    how_much_they_vary,
    kept_tensors,
    kernels,
    parallel,
    recorded_memory,
    speed,
    stored,
    table,
    warmup,
    which_run_out,
)


def _answer(study: str, cost: int, full: str = "", small: str | None = None) -> Measure:
    """A study that leaves its answer as JSON."""
    words = f"study {study} {full}".strip()
    return Measure(
        name=study, full=words, small=words if small is None else f"study {study} {small}".strip(), leaves="answer",
        cost=cost,
    )  # fmt: skip


_STEPS = Measure(
    name="step-time", full="sweep --model small,medium,large,xl,2.7B --seq-len 128,256,512,1024",
    small="sweep --model tiny --seq-len 64,128,256 --steps 5", cost=60,
)  # fmt: skip
_WARMUP = Measure(
    name="warmup", full="study warmup --model small --seq-len 512", small="study warmup --model tiny --seq-len 64",
    cost=20,
)  # fmt: skip
_KERNELS = Measure(
    name="kernels",
    full="sweep --model small,medium,large --seq-len 128,512,1024 --dtype fp32 --phase forward,train --record kineto",
    small="sweep --model tiny --seq-len 64,128 --phase forward,train --steps 5 --record kineto", cost=50,
)  # fmt: skip
_SPEED = Measure(
    name="precision-speed", full="study speed --model small,medium,large,xl,2.7B --seq-len 512 --dtype fp32,bf16",
    small="study speed --model tiny --seq-len 64 --dtype fp32,bf16 --steps 5", cost=40,
)  # fmt: skip
_MEMORY = Measure(
    name="memory", full="sweep --model 2.7B --seq-len 128,256,512 --dtype fp32,bf16 --phase forward,train",
    small="sweep --model tiny --seq-len 64,128 --dtype fp32,bf16 --phase forward,train --steps 5", cost=45,
)  # fmt: skip
_RECORDED = Measure(
    name="memory-recorded", full="sweep --model 2.7B --seq-len 512 --phase forward,train --record memory",
    small="sweep --model tiny --seq-len 64 --phase forward,train --steps 5 --record memory", cost=30,
)  # fmt: skip
_COMPILE = Measure(
    name="compile", full="study compile --model small,medium,large --seq-len 512",
    small="study compile --model tiny --seq-len 32 --phase forward --steps 5", cost=55,
)  # fmt: skip
_ATTENTION = Measure(
    name="attention", full="study attention --preset seeds",
    small="study attention --preset seeds --seq-len 64,128,256 --head-dim 16,32 --batch-size 1 --seconds 0.05",
    leaves="answer", cost=35,
)  # fmt: skip
_FLASH = Measure(
    name="attention-flash",
    full="study attention --seq-len 1024,4096,16384 --head-dim 64,128 --attention reference,flash --dtype bf16 "
    "--batch-size 1 --causal",
    small="study attention --seq-len 64,128,256 --head-dim 16,32 --batch-size 1 --heads 2 --attention reference,sdpa "
    "--causal --seconds 0.05", leaves="answer", cost=36,
)  # fmt: skip
_FLASH_STEP = Measure(
    name="attention-step", full="study attention-step --model large --seq-len 1024 --attention reference,flash",
    small="study attention-step --model tiny --seq-len 64 --attention reference,sdpa --steps 5", cost=38,
)  # fmt: skip
_COLLECTIVES = _answer("collectives", 32, "--ranks 2", "--ranks 2 --largest 64KiB --seconds 0.05")
_RANKS = Measure(
    name="parallel", full="study parallel --model large --ranks 2",
    small="study parallel --model tiny --seq-len 32 --parallel ddp-naive,ddp-flat,ddp-overlap,ddp-bucketed,zero1 "
    "--ranks 2 --steps 5", cost=58,
)  # fmt: skip
_PLAN = Measure(
    name="plan", full="plan --model llama3-405B --ranks 1024 --device H100 --seq-len 8192 --batch-size 1024",
    small="plan --model small --ranks 8 --batch-size 64", leaves="answer", cost=4,
)  # fmt: skip

_BY_LENGTH = ("forward, ms", "backward, ms", "memory", "without a time")

ASSIGNMENT = Assignment(
    name="cs336",
    title="CS336 assignment 2: systems",
    parts=(
        Part(
            title="Timing a step",
            questions=(
                Question(
                    id="benchmarking-b", asks="How long do forward and backward of each model take, and how much do "
                    "they vary?", measure=_STEPS,
                    source=table(
                        "model,seq_len", value="forward,backward,optimizer", statistic="mean-std",
                        where={"phase": "train", "dtype": "fp32", **PLAIN}, says=how_much_they_vary,
                    ),
                ),
                Question(
                    id="benchmarking-c", asks="What do the figures become without warm-up steps, or with few?",
                    measure=_WARMUP, source=warmup,
                ),
                Question(
                    id="benchmarking-lengths", asks="How does a training step grow with the sequence, and which cells "
                    "run out of memory?", measure=_STEPS,
                    source=table(
                        "model", "seq_len", where={"phase": "train", "dtype": "fp32", **PLAIN}, says=which_run_out,
                    ),
                ),
            ),
        ),
        Part(
            title="Kernels of a step",
            questions=(
                Question(
                    id="kernels-a", asks="How long is each phase in the profile, and is that what the timer says?",
                    measure=_KERNELS, source=kernels("a"),
                ),
                Question(
                    id="kernels-b", asks="Which kernel takes longest in forward, how often is it called, and is it the "
                    "same with backward?", measure=_KERNELS, source=kernels("b"),
                ),
                Question(
                    id="kernels-c", asks="Which kernels other than matrix products take time in forward?",
                    measure=_KERNELS, source=kernels("c"),
                ),
                Question(
                    id="kernels-d", asks="Which share of the time are matrix products, in inference and in a training "
                    "step?", measure=_KERNELS, source=kernels("d"),
                ),
                Question(
                    id="kernels-e", asks="How does softmax compare with the matrix products of attention, in time and "
                    "in FLOPs?", measure=_KERNELS, source=kernels("e"),
                ),
            ),
        ),
        Part(
            title="Mixed precision",
            questions=(
                Question(
                    id="accumulation", asks="What becomes of a sum of many small numbers in 16 bits?",
                    measure=_answer("accumulation", 1), source=stored("accumulation"),
                ),
                Question(
                    id="precision-a", asks="Which dtype has each part of the model under autocast?",
                    measure=_answer("autocast", 2, "--dtype fp16"),
                    source=stored("autocast", ("modules",), like="fp16"),
                ),
                Question(
                    id="precision-b", asks="Which parts of normalisation are sensitive to few bits, and is bf16 "
                    "treated as fp16 is?", measure=_answer("normalisation", 3),
                    source=stored("normalisation", ("squares", "error of the output by")),
                ),
                Question(
                    id="precision-c", asks="How much faster are forward and backward in bf16, by the size of the "
                    "model?", measure=_SPEED, source=speed,
                ),
            ),
        ),
        Part(
            title="Memory",
            questions=(
                Question(
                    id="memory-a", asks="How does memory develop over a training step, and what is it at the peak?",
                    measure=_RECORDED, source=recorded_memory,
                ),
                Question(
                    id="memory-b", asks="What is the peak by context length, of forward alone and of the full step?",
                    measure=_MEMORY,
                    source=table("model,seq_len", "phase", "peak_memory",
                                 where={"dtype": "fp32", "phase": "forward,train", **PLAIN}),
                ),
                Question(
                    id="memory-c", asks="Does mixed precision change the peak?", measure=_MEMORY,
                    source=table("model,seq_len,phase", "dtype", "peak_memory", speedup="fp32",
                                 where={"dtype": "fp32,bf16", "phase": "forward,train", **PLAIN}),
                ),
                Question(
                    id="memory-d", asks="How large are the tensors that a step keeps for backward, among them those of "
                    "the residual stream?", measure=_STEPS, source=kept_tensors,
                ),
                Question(
                    id="memory-e", asks="What do parameters, gradients, optimizer and activations add up to?",
                    measure=_STEPS, source=arithmetic_of_peak,
                ),
            ),
        ),
        Part(
            title="Attention",
            questions=(
                Question(
                    id="attention-a", asks="What do forward and backward of plain attention take by sequence length "
                    "and width, in time and memory, and where does memory run out?", measure=_ATTENTION,
                    source=stored("attention", (*_BY_LENGTH, "powers"), "full"),
                ),
                Question(
                    id="flash", asks="How does FlashAttention compare by length and width?", measure=_FLASH,
                    source=stored("attention", _BY_LENGTH, "causal"),
                ),
                Question(
                    id="flash-step", asks="What does another attention change in the whole training step?",
                    measure=_FLASH_STEP, source=attention_steps,
                ),
            ),
        ),
        Part(
            title="Compilation",
            questions=(
                Question(
                    id="compile-a", asks="What does torch.compile give attention alone?", measure=_ATTENTION,
                    source=stored("attention", ("beside compiled",), "full", plot=False),
                ),
                Question(
                    id="compile-b", asks="What does torch.compile give the whole model, in forward and in a training "
                    "step?", measure=_COMPILE, source=compiled,
                ),
            ),
        ),
        Part(
            title="Several GPUs",
            questions=(
                Question(
                    id="all-reduce", asks="How long does an all-reduce take by size and number of processes?",
                    measure=_COLLECTIVES, source=stored("collectives"),
                ),
                Question(
                    id="data-parallel", asks="What do data-parallel steps spend on communication, and what do one "
                    "message, overlap with backward and buckets change?", measure=_RANKS,
                    source=parallel(ranks.DATA_PARALLEL, ranks.STRONG, ranks.PHASES, ranks.COMMUNICATION),
                ),
                Question(
                    id="sharding", asks="What does sharding the optimizer's state, or everything, save and cost?",
                    measure=_RANKS, source=parallel(ranks.SHARDED, ranks.STRONG, ranks.MEMORY),
                ),
                Question(
                    id="accounting", asks="What does each GPU need of memory and links by layout, and which layout is "
                    "fastest?", measure=_PLAN, source=stored("plan"),
                ),
            ),
        ),
    ),
)  # fmt: skip
