"""Who runs, who waits, and what the next forward pass holds."""
