"""Where a process runs: what is read there leaves its collector as it was."""

import gc

from stepscope.core.environment import without_collector


def test_what_a_process_has_set_aside_stays_so():
    """A training script freezes what it has made, as nanochat does: thawed, each collection would search all of it."""
    aside = [[]]
    gc.freeze()
    with without_collector():
        made = [[]]
    assert gc.isenabled() and gc.is_tracked(made)
    found = {id(each) for each in gc.get_objects()}
    assert id(aside) not in found and id(made) in found
