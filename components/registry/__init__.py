"""MLflow runs, model versions, gates, and the promotion of versions with its audit chain.

This package imports `evaluation`. Besides `flows`, it is the only package that imports MLflow. Start with
`promotion.py`.
"""
