"""Full-parameter supervised fine-tuning on DeepSpeed ZeRO-3, with Levanter's training semantics."""

__version__ = "0.1.0"
