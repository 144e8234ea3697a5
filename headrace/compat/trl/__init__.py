"""TRL's GRPOTrainer, with asynchronous training behind it: a script changes one import.

    from trl import GRPOConfig
    from headrace.compat.trl import GRPOTrainer        # instead of: from trl import GRPOTrainer

    GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward, args=GRPOConfig(output_dir="out"), train_dataset=rows).train()

Read `fields.py` (what becomes of every argument), `grpo_config.py` (the arguments, without TRL), `trl_settings.py` (arguments as settings),
`trl_model.py` (models, adapters, tokenizers) and `grpo_trainer.py` (the trainer).
"""

from headrace.compat.trl.grpo_config import GRPOConfig
from headrace.compat.trl.grpo_trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
