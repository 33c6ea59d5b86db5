"""What `import stepscope` offers, as a caller in Python uses it."""

import copy
import inspect
import itertools
import json
import pydoc
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stepscope
from stepscope.app.verbs.results import ShownAnswer, as_text
from stepscope.core.answer import encode_answer
from stepscope.core.errors import InputError
from stepscope.core.formulas.spelled import run_call
from stepscope.core.model_config import MODEL_OPTIONS, configure
from stepscope.core.options import Option
from stepscope.core.parts import PARTS
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload
from stepscope.engine.workload_options import OPTIONS, flags_of
from stepscope.runs.answer import answer_run
from tests.conftest import at_length

DATA = Path(__file__).parents[2] / "data"
FUNCTIONS = ("fit", "measure", "memory", "run", "show", "trace", "watch")
QUICK: dict[str, Any] = {"device": "cpu", "steps": 6, "warmup": 1, "profile": False}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# --- what is imported ---


def test_to_import_stepscope_imports_next_to_nothing():
    heavy = "{'torch', 'polars', 'msgspec', 'numpy', 'rich', 'click'} & set(sys.modules)"
    assert python(f"import sys, stepscope; dir(stepscope); print({heavy})") == "set()\n"


def test_what_only_reads_and_predicts_imports_no_torch():
    code = f"""
import sys, stepscope
print(stepscope.trace({str(DATA / "kineto_train.json.gz")!r}).summary.steps)
print(stepscope.memory({str(DATA / "snapshot_train.pickle.gz")!r}).explained.snapshot.device)
print(stepscope.fit('tiny').fits, stepscope.show('results/cpu/first').run.status)
print(len(stepscope.compare('results/h200/plain', 'results/h200/tf32', across='dtype').changes))
print('torch' in sys.modules)
"""
    assert python(code).splitlines()[2:] == ["None done", "20", "False"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_is_of_the_function_and_says_what_it_takes(name: str):
    function = getattr(stepscope, name)
    text = pydoc.render_doc(function)
    assert inspect.isfunction(function) and f"{name}(" in text
    words = inspect.getdoc(function) or ""
    missing = [p for p in inspect.signature(function).parameters if p not in words]
    assert not missing, f"help(stepscope.{name}) says nothing of {missing}"


def test_functions_keep_their_names_where_a_room_has_the_same():
    code = """
import stepscope.recording.timer, stepscope.traces.captures.digest, stepscope.allocations.prediction.fit
from stepscope.recording.timer import measure
import stepscope
print(*(type(getattr(stepscope, name)).__name__ for name in ("measure", "trace", "memory")))
print(stepscope.recording.timer.measure is measure, stepscope.allocations.prediction.fit.__name__)
"""
    assert python(code) == "function function function\nTrue stepscope.allocations.prediction.fit\n"
    with pytest.raises(AttributeError, match="has no attribute 'mesure'"):
        _ = stepscope.mesure  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


# --- run ---


@pytest.mark.slow
def test_a_module_is_measured_and_left_as_it_was(tmp_path: Path):
    model = net()
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(4, 8), torch.randn(4, 8)]
    measured = stepscope.run(model, batches, square, runs=tmp_path, tag="mine", **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    run = measured.run
    assert (run.status, run.tag, run.samples["step"].count) == ("done", "mine", 6)
    assert load_run(measured.directory) == run
    assert isinstance(run.workload, FactoryWorkload)
    assert (run.workload.model.name, run.workload.model.parameters) == ("Sequential", 8 * 16 + 16 + 16 * 4 + 4)
    assert {name: tensor.shape for name, tensor in run.workload.model.inputs.items()} == {"input": (4, 8)}
    assert measured.samples is run.samples
    assert encode_answer(measured.answer) == encode_answer(answer_run(run, str(measured.directory)))
    assert repr(measured).startswith("Sequential: 212 parameters (given as an object)\nbatch input float32[4, 8]")
    assert measured.trace is None and measured.memory is None


@pytest.mark.slow
def test_the_forms_of_a_batch_and_of_a_loss_are_those_of_a_factory(tmp_path: Path):
    def entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels)

    batch = (torch.randn(4, 8), torch.arange(4))
    assert stepscope.run(net(), batch, entropy, runs=tmp_path, **QUICK).run.status == "done"
    by_name = {"input": batch[0], "labels": batch[1]}
    assert stepscope.run(net(), by_name, entropy, runs=tmp_path, **QUICK).run.status == "done"
    inferred = stepscope.run(net(), batch[0], phase="forward", dtype="bf16", runs=tmp_path, **QUICK)
    assert (inferred.run.workload.dtype, set(inferred.samples)) == ("bf16", {"step", "host", "forward"})


@pytest.mark.slow
def test_the_experiment_is_named_by_structure_and_batch(tmp_path: Path):
    def key(model: nn.Module, size: int = 4) -> str:
        return stepscope.run(model, torch.randn(size, 8), square, runs=tmp_path, **QUICK).run.workload.key

    assert key(net()) == key(net())
    assert len({key(net()), key(net(), 6), key(nn.Sequential(nn.Linear(8, 2)))}) == 3


@pytest.mark.slow
def test_an_optimizer_of_ones_own_steps_the_copy(tmp_path: Path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = copy.deepcopy(model.state_dict())
    measured = stepscope.run(model, torch.randn(4, 8), square, optimizer=optimizer, runs=tmp_path, **QUICK)
    assert measured.run.workload.optimizer == "SGD"
    assert measured.samples["optimizer"].median_s
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_the_textbooks_model_and_a_factory_are_measured_by_name(tmp_path: Path):
    by_name = stepscope.run("tiny", seq_len=16, batch_size=2, layers=1, attention="sdpa", runs=tmp_path, **QUICK)
    assert isinstance(by_name.run.workload, TextbookWorkload)
    assert by_name.run.workload.model.name == "tiny+layers1" and by_name.run.workload.seq_len == 16
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def make(width):\n"
        "    return torch.nn.Linear(width, 1), torch.ones(3, width), lambda y: y.square().sum()\n"
    )
    made = stepscope.run(module=f"{file}:make", arguments={"width": 5}, runs=tmp_path, **QUICK)
    assert isinstance(made.run.workload, FactoryWorkload) and made.run.workload.arguments == {"width": 5}
    assert made.run.workload.model.parameters == 6


@pytest.mark.slow
def test_ctrl_c_keeps_what_ranks_measured(tmp_path: Path):
    """In a program of the user's own, whose Ctrl-C is Python's: no handler of ours is there before."""
    program = (
        "import signal, stepscope\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "stepscope.run('tiny', d_model=32, layers=1, vocabulary=101, seq_len=8, parallel='ddp', ranks=2, device='cpu',"
        " warmup=1, steps=100000, profile=False,"
        " tell=lambda stage: print(stage.name, flush=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line == "measure\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert "interrupted; what was measured is in runs/" in said and "CancelledError" not in said
    assert said.endswith("KeyboardInterrupt\n")
    (stored,) = tmp_path.glob("runs/*/run.json")
    assert json.loads(stored.read_bytes())["status"] == "interrupted"


@pytest.mark.parametrize("of", ["Sequential", *at_length("tiny")])
def test_ranks_share_a_step_as_by_the_command(tmp_path: Path, of: str):
    """A factory and a named model, and `tune` prints the line that was called."""
    (tmp_path / "own.py").write_text(OWN_FACTORY)
    told: list[str] = []
    model: dict[str, Any] = {"module": f"{tmp_path}/own.py:make"}
    if of == "tiny":
        model = {"model": of, "seq_len": 8, "batch_size": 4}
    measured = stepscope.run(
        **model, parallel="ddp", ranks=2, device="cpu", warmup=1, steps=3, runs=tmp_path / "runs",
        tell=lambda stage: told.append(stage.name),
    )  # fmt: skip
    run = measured.run
    assert run.status == "done" and run.shared is not None and len(run.shared.ranks) == 2
    assert (measured.samples["step"].median_s or 0) > 0 and load_run(measured.directory).id == run.id
    assert {"check ranks", "measure"} <= {*told}
    assert run.workload.name == of
    called = TextbookWorkload(model=configure("tiny"), seq_len=8, batch_size=4, parallel="ddp", ranks=2)
    assert run_call(called) == "stepscope.run('tiny', parallel='ddp', ranks=2, seq_len=8)"
    assert of != "tiny" or run.workload == called


OWN_FACTORY = """
import torch

def make():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    return net, torch.ones(4, 8), lambda y: y.square().mean()
"""


@pytest.mark.slow
def test_what_a_run_recorded_is_explained_with_it(tmp_path: Path):
    measured = stepscope.run(net(), torch.randn(4, 8), square, record="kineto,memory", runs=tmp_path, **QUICK)
    assert measured.trace is not None and measured.memory is not None
    assert set(measured.trace.summary.phase_names) >= {"forward", "backward", "optimizer"}
    notes = measured.memory.explained.snapshot.notes
    assert notes is not None and notes.workload == measured.run.workload
    assert [answer.study for answer in measured.answers] == ["run", "trace", "memory"]
    again = stepscope.show(measured.directory.name[-12:], runs=tmp_path)
    assert again.run == measured.run and repr(again) == repr(measured)
    page = measured._repr_html_()
    assert page.count('<div class="stepscope">') == 3 and page.count("<table>") >= 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "huge"}, "unknown model 'huge': choose one of tiny"),
        ({"model": 3}, "the model is int: give an nn.Module, the name of a preset, or module="),
        ({"model": net(), "module": "a.py:make"}, "model and module both say which model is meant"),
        (
            {"model": "tiny", "batch": torch.ones(2)},
            "batch: only a model that is an nn.Module takes it, the textbook's model has its own",
        ),
        (
            {"module": "a.py:make", "loss": square},
            "loss: only a model that is an nn.Module takes it, a factory gives its own",
        ),
        ({"arguments": {"width": 3}}, "arguments belong to module, a factory"),
        (
            {"model": net(), "seq_len": 4},
            "only the textbook's model takes seq_len: your module and its batch say their own sizes",
        ),
        ({"module": "a.py:make", "layers": 2}, "only the textbook's model takes layers: give the factory arguments"),
        ({"model": net(), "batch": torch.ones(2, 8), "seed": 1}, "seed is of weights that are made"),
        ({"model": net(), "batch": torch.ones(2, 8), "record": "nsys"}, "nsys watches a process of its own"),
        ({"record": "vtune"}, "unknown record 'vtune': choose one of memory, kineto, nsys"),
        ({"model": net(), "batch": torch.ones(2, 8)}, "the model Sequential has no loss: forward returned a tensor"),
        ({"model": net(), "batch": torch.ones(2, 7), "loss": square}, "the model Sequential fails in forward: "),
        (
            {"model": net(), "batch": torch.ones(2, 8), "loss": lambda output: output.nope},
            "the model Sequential fails in forward, in its loss function: AttributeError",
        ),
        ({"model": nn.Linear, "batch": torch.ones(2, 8)}, "the model is the class Linear: give an nn.Module"),
        (
            {"model": "tiny", "optimizer": torch.optim.SGD(net().parameters())},
            "optimizer: only a model that is an nn.Module takes it",
        ),
        ({"model": "tiny", "device": "tpu"}, "unknown device 'tpu'"),
        (
            {"model": net(), "batch": torch.ones(2, 8), "loss": square, "parallel": "ddp", "ranks": 2},
            "ranks are processes of their own, which have no such object: give module='FILE:FACTORY'",
        ),
        ({"model": "tiny", "ranks": 2}, "2 ranks need a way to share the step: say --parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_wrong_input_is_one_line(tmp_path: Path, given: dict[str, Any], message: str):
    arguments: dict[str, Any] = {**QUICK, "runs": tmp_path, **given}
    with pytest.raises(InputError) as caught:
        stepscope.run(**arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_module_that_cannot_be_copied_is_not_trained(tmp_path: Path):
    class Guarded(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise RuntimeError("one of a kind")

    model = Guarded(8, 4)
    with pytest.raises(
        InputError, match=r"cannot be copied, and measuring would train it: give a factory.*one of a kind"
    ):
        stepscope.run(model, torch.ones(2, 8), square, runs=tmp_path, **QUICK)


# --- measure ---


def test_phases_of_anything_are_timed_in_their_order():
    told: list[str] = []
    timed = stepscope.measure(
        {"forward": lambda: told.append("f"), "backward": lambda: told.append("b")},
        prepare=lambda: told.append("p"), device="cpu", warmup=2, steps=7,
    )  # fmt: skip
    assert "".join(told) == "pfb" * 9
    assert list(timed.samples) == ["step", "host", "forward", "backward"]
    for samples in timed.samples.values():
        assert (samples.count, len(samples.warmup_s)) == (7, 2)
    for step, forward, backward in zip(
        *(timed.samples[name].values_s for name in ("step", "forward", "backward")), strict=True
    ):
        assert 0 < forward + backward <= step
    assert [row[0] for row in timed.answer.table("phase").rows] == ["forward", "backward", "step"]
    assert "7 steps of one process measured after 2 warm-up steps" in repr(timed)


def test_one_callable_is_a_phase_of_its_name():
    def halve() -> float:
        return 1 / 2

    assert "halve" in stepscope.measure(halve, device="cpu", steps=5, warmup=0).samples
    named = stepscope.measure(nn.Identity().eval, device="cpu", steps=5, warmup=0)
    assert named.answer.question == "How long does eval take?"


def test_what_a_callable_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        stepscope.measure({"divide": lambda: 1 / 0}, device="cpu")


@pytest.mark.parametrize(
    ("callables", "message"),
    [
        ({}, "the callables are empty: give a function"),
        (3, "the callables are int: give a function"),
        ({"a": 3}, "the phase 'a' is int, which cannot be called"),
        ({"step": print}, "a phase is named 'step': give it a name of its own; step and host are the timer's"),
        ({2: print}, "a phase is named 2: give it a name of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused(callables: Any, message: str):
    with pytest.raises(InputError) as caught:
        stepscope.measure(callables, device="cpu")
    assert message in str(caught.value)


# --- trace, memory, fit, show ---


def test_a_capture_is_that_of_the_command(capsys: pytest.CaptureFixture[str]):
    from stepscope.app.cli.app import app

    file = DATA / "kineto_train.json.gz"
    app(["trace", str(file), "--phase", "forward"], standalone_mode=False)
    found = stepscope.trace(file, phase="forward")
    assert f"{found!r}\n" == capsys.readouterr().out
    assert found.summary.part is not None
    with pytest.raises(InputError, match="no such file, nor a run of that name"):
        stepscope.trace("nowhere")


def test_a_snapshot_is_that_of_the_command(capsys: pytest.CaptureFixture[str]):
    from stepscope.app.cli.app import app

    file = DATA / "snapshot_train.pickle.gz"
    app(["memory", str(file), "--at", "end", "--stacks", "1"], standalone_mode=False)
    found = stepscope.memory(file, at="end", stacks=1)
    assert f"{found!r}\n" == capsys.readouterr().out
    assert sum(found.moment.categories.values()) == found.moment.alive["block"].sum()


def test_a_prediction_is_that_of_the_command(capsys: pytest.CaptureFixture[str]):
    from stepscope.app.cli.app import app

    app(["fit", "--model", "xl", "--seq-len", "1024", "--memory", "80GiB", "--json"], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    found = stepscope.fit("xl", seq_len=1024, memory="80GiB")
    assert (found.fits, found.peak_bytes) == (printed["fits"], printed["peak_bytes"]) and not found.fits
    assert [plan.options for plan in found.plans] == [plan["options"] for plan in printed["plans"]]
    by_bytes = stepscope.fit("xl", seq_len=1024, memory=80 * 2**30, attention="sdpa")
    assert by_bytes.fits and by_bytes.plans == ()
    alone = stepscope.fit("xl", seq_len=1024)
    assert (alone.fits, alone.peak_bytes) == (None, found.peak_bytes)
    with pytest.raises(InputError, match="memory and device both say how much there is"):
        stepscope.fit("xl", memory="80GiB", device="H100")
    with pytest.raises(InputError, match="the model is int: give an nn"):
        stepscope.fit(3)  # type: ignore[arg-type]


def test_of_lists_the_step_that_needs_most_is_predicted_with_each_of_them():
    found = stepscope.fit("tiny", seq_len=[64, 128], device=["4090", "L4"])
    assert [one.workload.seq_len for one in found.steps] == [64, 64, 128, 128]
    assert found.peak_bytes == found.steps[2].peak_bytes == stepscope.fit("tiny", seq_len=128).peak_bytes
    assert found.fits and found.verdict == found.steps[2].verdict
    assert [row[0] for row in found.answer.tables[0].rows] == ["64", "128"] and "fits 4090" in repr(found)
    assert not stepscope.fit("tiny", dtype=["fp32", "bf16"], memory="64MiB").fits
    assert stepscope.fit("tiny", memory="150MiB").ways


OF_BOTH = [one for one in OPTIONS if one.choices and one.flag in {*flags_of("run")} & {*flags_of("fit")} - {"--model"}]
BESIDE = {"dtype": "bf16"}, {"compile": "default"}, {"compile": "blocks"}, {"graph": "step", "optimizer": "adamw-fused"}


@pytest.mark.parametrize("option", OF_BOTH, ids=lambda option: option.flag)
def test_every_choice_that_a_run_has_is_predicted_or_refused_in_one_line_that_says_what_is(option: Option):
    """A choice of the textbook's model that is refused is predicted with the first remedy that its line names."""
    assert {*flags_of("run")} - {*flags_of("fit")} == {"--parallel", "--ranks", "--seed"}
    sizes = {"layers": 1, "d_model": 64, "heads": 2, "d_ff": 128, "vocabulary": 128, "seq_len": 64}

    def ask(**choices: Any) -> str:
        kernels = {name: choices.pop(name) for name in [*choices] if name in PARTS} or choices.pop("kernels", None)
        choices.pop("kernels", None)
        try:
            return "" if stepscope.fit("tiny", **sizes, **choices, kernels=kernels).peak_bytes > 0 else "0 B"
        except InputError as error:
            return str(error)

    for beside, choice in itertools.product(BESIDE, option.choices):
        if said := ask(**{**beside, option.name: choice}):
            remedy = re.search(r": (?:choose|ask for) (?:one of )?(.+)", said)
            assert remedy and len(said) < 400, said
            named = dict(re.findall(r"--(\w+) ([\w-]+)", remedy[1].partition(", or ")[0]))
            first = named or {option.name: remedy[1].partition(",")[0]}
            assert not ask(**{**beside, option.name: choice, **first}), (said, first)


def test_a_stored_run_is_predicted_on_another_card():
    llama = next(Path("results/h200/loops").glob("*Llama*"))
    found = stepscope.fit(run=llama, device=["4090", "L4"], batch_size=[8, 16])
    assert [one.workload.batch_size for one in found.steps] == [8, 8, 16, 16] and found.fits
    assert stepscope.fit(run="results/cpu/first").peak_bytes == stepscope.fit("tiny", seq_len=128).peak_bytes
    with pytest.raises(InputError, match="cannot say it, since its watch left none"):
        stepscope.fit(run=llama, seq_len=64)


def test_operands_in_blocks_are_answered_by_format():
    """bf16 keeps 16 bits a number; mxfp8 8 and a scale of 8 for 32; nvfp4 4 and a scale of 8 for 16."""
    found = stepscope.fit("tiny", recipe=["mxfp8", "nvfp4"], device="B200")
    without, mxfp8, nvfp4 = found.answer.tables[0].rows
    assert [row[1:3] for row in (without, mxfp8, nvfp4)] == [(16, 0), (8.25, 0.25), (4.5, 0.5)]
    assert found.by_recipe == {"mxfp8": mxfp8[4], "nvfp4": nvfp4[4]} and found.peak_bytes == mxfp8[4]
    assert found.estimate.peak_bytes == without[4] and found.fits is None
    with pytest.raises(InputError, match="unknown recipe 'mxfp9': choose one of mxfp8"):
        stepscope.fit("tiny", recipe="mxfp9")
    with pytest.raises(stepscope.LimitExceeded, match=r" in mxfp8 is .*, 1 B larger than fail_if_larger"):
        stepscope.fit("tiny", recipe=["mxfp8", "nvfp4"], fail_if_larger=found.peak_bytes - 1)
    with pytest.raises(InputError, match="recipe is of one new step: leave out parallel and ranks; `plan --recipe`"):
        stepscope.fit("tiny", recipe="mxfp8", parallel="zero1", ranks=2)
    with pytest.raises(InputError, match="recipe looks at one device, and device names 2: name one"):
        stepscope.fit("tiny", recipe="mxfp8", device=["B200", "H100"])


def test_what_a_rank_holds_is_answered_by_strategy():
    """AdamW's two moments of fp32 weights, half of them on each of two ranks with ZeRO-1: the least that is saved."""
    found = stepscope.fit("tiny", parallel=["zero1", "none"])
    count = found.answer.tables[0].rows[0][2]
    assert isinstance(count, int)
    alone, shared = found.by_strategy["none"], found.by_strategy["zero1"]
    assert found.peak_bytes == alone >= shared + count and found.fits is None


def test_a_peak_beyond_its_limit_is_raised():
    peak = stepscope.fit("tiny").peak_bytes
    assert stepscope.fit("tiny", fail_if_larger=peak).peak_bytes == peak
    with pytest.raises(stepscope.LimitExceeded, match=r"tiny-b4-s512-fp32-train is .*, 1 B larger than fail_if_larger"):
        stepscope.fit("tiny", fail_if_larger=peak - 1)
    with pytest.raises(stepscope.LimitExceeded, match="1 of 2 steps are larger"):
        stepscope.fit("tiny", seq_len=[64, 512], fail_if_larger=peak - 1)


@pytest.mark.slow
def test_a_module_of_ones_own_is_predicted_as_its_factory_is(tmp_path: Path):
    """By its factory, in a process of its own, and as an object, in this one, of which nothing is trained or faked."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make(width):\n"
        "    model = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))\n"
        "    return model, torch.randn(2, 8192, width), lambda output: (output * output).mean()\n"
    )
    asked: dict[str, Any] = {"phase": "forward-backward", "dtype": "bf16", "memory": "112MiB"}
    by_factory = stepscope.fit(module=f"{file}:make", arguments={"width": 64}, **asked)
    model, batch = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(2, 8192, 64)
    before = copy.deepcopy(model.state_dict())
    found = stepscope.fit(model, batch, lambda output: (output * output).mean(), **asked)
    assert isinstance(found.workload, FactoryWorkload) and found.workload.model.parameters == 2 * 64 * 256 + 256 + 64
    assert found.peak_bytes == by_factory.peak_bytes > 96 * 2**20  # of which cuBLAS takes 64 MiB
    assert (found.fits, found.largest_batch, found.longest_sequence) == (False, 1, None)
    # It has no blocks, so that nothing can be checkpointed.
    assert [plan.options for plan in found.plans] == ["--accumulation 2"] and found.plans == by_factory.plans
    assert all(type(value) is torch.Tensor and torch.equal(value, before[k]) for k, value in model.state_dict().items())
    assert "It does not safely fit into 112.00 MiB for PyTorch's allocator" in repr(found)
    assert "<table>" in found._repr_html_()
    trained = stepscope.fit(model, batch, square, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert trained.fits is None and trained.workload.optimizer == "SGD"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": net(), "batch": torch.ones(2, 8), "loss": square, "seq_len": 4},
            "only the textbook's model takes seq_len",
        ),
        ({"model": net(), "module": "a.py:make"}, "model and module both say which model is meant"),
        ({"model": net(), "batch": torch.ones(2, 8)}, "the model Sequential has no loss"),
        ({"model": net(), "batch": torch.ones(2, 8), "loss": square, "compile": "max-autotune"}, "replays CUDA graphs"),
        ({"model": "tiny", "batch": torch.ones(2)}, "batch: only a model that is an nn.Module takes it"),
        (
            {"model": "tiny", "parallel": "zero1", "memory": "8GiB"},
            "parallel is of the textbook's model, and asks for no",
        ),
        ({"model": "tiny", "ranks": 2}, "ranks belong to parallel"),
        ({"model": "tiny", "seq_len": []}, "seq_len is an empty list"),
        ({"model": "tiny", "fail_if_larger": 0}, "fail_if_larger is 0: give bytes above zero"),
        ({"module": "a.py:make", "arguments": {"seq_len": 8}, "seq_len": 8}, "seq_len stand in arguments, too"),
        ({"model": SimpleNamespace(phases=[("forward", print)])}, "is a step of its own, with phases"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_cannot_be_predicted_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        stepscope.fit(**given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_stored_run_shows_as_it_did():
    found = stepscope.show("results/cpu/first")
    assert found.directory.parent == Path("results/cpu/first") and load_run(found.directory) == found.run
    assert found.samples["step"].count == 58
    assert repr(found.answer.part("memory")).splitlines()[0].split() == ["memory", "allocated"]
    with pytest.raises(InputError, match="names no table: there are 'phase', 'memory', and findings"):
        found.answer.table("kernels")


@pytest.mark.parametrize("function", [stepscope.run, stepscope.fit])
def test_every_option_of_the_model_is_a_parameter_and_another_keyword_is_refused(function: Any):
    parameters = inspect.signature(function).parameters
    assert {option.name: None for option in MODEL_OPTIONS} == {
        option.name: parameters[option.name].default for option in MODEL_OPTIONS
    }
    assert parameters["layers"].annotation == int | None
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'widht'$"):
        function("tiny", widht=64)


# --- what shows itself ---


def test_an_answer_and_its_tables_show_themselves():
    answer = stepscope.fit("tiny", memory="1GiB").answer
    assert type(answer) is ShownAnswer and type(answer.part("phase")) is ShownAnswer
    table = answer.table("phase by phase")
    assert repr(answer) == as_text(answer) == str(answer)
    assert repr(table) in repr(answer) and "<table>" in table._repr_html_()
    assert answer._repr_html_().count("<table>") == len([each for each in answer.tables if each.columns])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": object()}, "give a preset's name"),
        ({"model": "tiny", "budget": "soon"}, "budget is 'soon': write seconds"),
        ({"model": "tiny", "keep": ["colour"]}, "colour"),
        ({"model": "tiny", "dtype": "bf17"}, "bf17"),
        ({"model": "tiny", "phase": "forward"}, "tune makes a training step faster"),
        ({"model": "tiny", "module": "a.py:b"}, "model and module both say"),
    ],
)
def test_a_search_that_cannot_begin_is_refused(tmp_path: Path, given: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        stepscope.tune(**given, device="cpu", runs=tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
