"""A model's forward pass in PyTorch: the known families, and any other through Hugging Face's own."""
