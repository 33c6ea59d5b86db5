"""RMSNorm and LayerNorm in few bits."""
