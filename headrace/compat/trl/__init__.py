"""TRL's trainers that sample (GRPO, RLOO, AsyncGRPO, OnlineDPO, Distillation), with headrace's asynchronous training behind them: a script
changes one import.

    from trl import GRPOConfig
    from headrace.compat.trl import GRPOTrainer        # instead of: from trl import GRPOTrainer

    GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward, args=GRPOConfig(output_dir="out"), train_dataset=rows).train()

Read `trl_settings.py` (what becomes of every argument, the arguments without TRL, arguments as settings), `grpo_trainer.py` (models, adapters,
tokenizers, and the trainer) and `other_trainers.py`.
"""

from headrace.compat.trl.grpo_trainer import GRPOTrainer
from headrace.compat.trl.other_trainers import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    DistillationConfig,
    DistillationTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from headrace.compat.trl.trl_settings import GRPOConfig

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
]
