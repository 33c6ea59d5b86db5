"""The order in which tables have the values of a field."""

from stepscope.runs.fields import field_named


def test_a_strategy_s_options_stand_behind_it():
    asked = ["fsdp2", "ddp:unused=yes", "none", "ddp", "fsdp2:reshard=no", "ddp:bucket=5", "of-another-version"]
    right = ["none", "ddp", "ddp:bucket=5", "ddp:unused=yes", "fsdp2", "fsdp2:reshard=no", "of-another-version"]
    assert sorted(asked, key=field_named("parallel").rank) == right
