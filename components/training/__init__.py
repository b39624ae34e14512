"""The four training stages on one engine: warm-up, rejection fine-tuning, critic pretraining, agentic PPO.

This package imports the other component packages, including `agent` and `judge`. Start reading with
`run_stage.py`.
"""
