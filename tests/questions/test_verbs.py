"""What the verbs of the precision lab refuse, each in one line."""

import shlex

import pytest

from tests.questions.verbs import refused

REFUSED = """
accumulation --addend 0                          => --addend is 0: give a finite number above zero, as in 0.01
accumulation --addend inf                        => --addend is inf: write a finite number
accumulation --count 0                           => --count is 0: it must be a whole number of at least 1
accumulation --count 1000000                     => --count is 1000000: it must be a whole number of at least 1
formats --value 'a lot'                          => --value 'a lot' is no number
formats --value 1e400                            => --value '1e400' is beyond the largest number of fp64
formats --value 1e-999999999999                  => --value '1e-999999999999' is zero in fp64
formats --value ''                               => --value '' is no number
normalisation --scales 1,inf                     => --scales holds 'inf', which is not finite
normalisation --scales nan                       => --scales holds 'nan', which is not finite
normalisation --scales 0                         => --scales holds 0: write numbers above zero
normalisation --scales 1,,2                      => --scales holds '', which is no number
normalisation --widths 16.5                      => --widths holds 16.5: write whole numbers
normalisation --widths 1e9                       => --widths holds 1e+09: write whole numbers from 1 to 65,536
normalisation --epsilon=-1e-5                    => --epsilon holds -1e-05: write numbers above zero
normalisation --epsilon 1e-5,1e-6                => --epsilon holds 2 numbers: write one
normalisation --epsilon inf                      => stepscope: --epsilon holds 'inf', which is not finite: leave it out
normalisation --device tpu                       => unknown device 'tpu'
softmax --row 1,-inf                             => --row holds '-inf', which is not finite
softmax --row 1,nan                              => stepscope: --row holds 'nan', which is not finite: leave it out
softmax --row ''                                 => --row holds '', which is no number
softmax --row 1,two                              => --row holds 'two', which is no number
softmax --scales=-1                              => --scales holds -1: write numbers above zero
softmax --device cuda:99                         => no GPU for --device cuda:99
underflow --format fp12                          => unknown format 'fp12'
underflow --model huge                           => unknown model 'huge'
underflow --seq-len 100000000                    => tokens, and there are
scaling --overflow-at x                          => --overflow-at 'x'
scaling --overflow-at 201                        => planted overflow
swallowed --learning-rate fast                   => --learning-rate 'fast'
swallowed --remedies-at=-1                       => learning rate -1.0
quality --device cpu --variants tf32             => tf32 needs an NVIDIA GPU
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_wrong_input_is_one_line(line: str):
    arguments, said = line.split("=>")
    assert said.strip() in refused(*shlex.split(arguments))
