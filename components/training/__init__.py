"""The four training stages on one engine: warm-up, rejection fine-tuning, critic pretraining, agentic PPO.

The cold start of a language model, which may precede them, is here too. This package imports the other
component packages, including `agent` and `judge`. Start reading with `run_stage.py`.
"""
