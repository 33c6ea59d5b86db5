"""AdamW of many tensors in one launch."""
