"""Doors from other libraries: `trl/` runs scripts that were written for TRL's GRPOTrainer."""
