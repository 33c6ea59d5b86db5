"""Labels of kernels: short, and never the same for two kernels of one table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import LONGEST_NAME, visible
from stepscope.traces.kernels.names import kernel_label, kernel_labels


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["void bn_bw<float, 512, true>(int)", "void bn_bw<float, 128, true>(int)"], ["bn_bw <512>", "bn_bw <128>"]),
        (["void one(int)", "void other(int)"], ["one", "other"]),
        (["void f(int)", "void f(long)"], ["f <int>", "f <long>"]),
        (["_Z1fILi64EEvi", "_Z1fILi128EEvi"], ["f <64>", "f <128>"]),
        (["g<1,2>(int)", "g<1, 2>(int)"], ["g (1)", "g (2)"]),
    ],
)
def test_kernels_of_one_label_are_told_apart(names: list[str], labels: list[str]):
    assert list(kernel_labels(names).values()) == labels


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("[bold]x[/bold]", "[bold]x[/bold]"), ("\x1b[2Jevil", "\\u001b[2Jevil"), ("\u202eevil", "\\u202eevil"),
        ("a\nb", "a b"), ("k\x00", "k\\u0000"), ("", "(no name)"), (" \n", "(no name)"),
        ("void f(int) [clone .kd]", "f"), ("void at::native::f<x[2]>(int)", "f"),
    ],
)  # fmt: skip
def test_hostile_names_are_shown_and_not_swallowed(name: str, label: str):
    assert kernel_labels([name])[name] == label


@given(st.lists(st.text(max_size=30) | st.text("ab<,>(): ", max_size=30) | st.text("x", min_size=300), unique=True))
def test_no_two_kernels_share_a_label(names: list[str]):
    labels = kernel_labels(names)
    assert set(labels) == set(names)
    assert len(set(labels.values())) == len(names)
    assert all(label.isprintable() and label == visible(label) for label in labels.values())
    assert all(len(label) <= LONGEST_NAME + 60 for label in labels.values())


def test_a_label_alone_is_what_runs():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    assert kernel_label(name) == "vectorized_elementwise_kernel CUDAFunctor_add"
