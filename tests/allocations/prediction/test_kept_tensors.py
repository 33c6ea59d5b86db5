"""What a block keeps, by its shapes: sizes that are equal by chance must not change what a tensor is called."""

from stepscope.allocations.prediction.estimate import kept_by_block
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload


def test_scores_are_scores_where_another_shape_has_as_many_bytes():
    # 1 x 4 x 64 x 64 x 4 B of scores are as many bytes as 1 x 64 x 512 x 2 B of the feed-forward network's width.
    kept = kept_by_block(TextbookWorkload(model=configure("tiny"), batch_size=1, seq_len=64))
    scores = [tensor for tensor in kept if tensor.dimensions.count("seq_len") == 2 and "heads" in tensor.dimensions]
    assert scores and all(tensor.sizes == (1, 4, 64, 64) and tensor.itemsize == 4 for tensor in scores)
    assert all(tensor.itemsize in (1, 4) for tensor in kept)
