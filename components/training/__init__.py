"""The four training stages on one engine: warm-up, rejection fine-tuning, critic pretraining, agentic PPO.

Imports everything below it, `agent` and `judge` included. Start with `run_stage.py`.
"""
