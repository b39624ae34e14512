"""MLflow runs and model versions, gates, and promotion with its audit chain.

Imports `evaluation`; the only package besides `flows` that imports MLflow. Start with `promotion.py`.
"""
