"""What a setting of PyTorch's caching allocator gives."""
