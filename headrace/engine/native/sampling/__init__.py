"""From logits to tokens, and when a completion ends."""
